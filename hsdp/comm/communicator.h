// A group of ranks and its collectives; sums only [Note: why all-to-all and our own sum].
//
// Every rank of the group calls every collective, in the same order. The stream passed to calls on
// one Communicator orders them; never use one Communicator on two streams at a time (split a second
// one). With `Stream::inline_host()` a call returns when it is complete. With an asynchronous
// stream it returns immediately, and the memory must stay valid until the stream has passed it. A
// collective is complete on a rank when its outputs are written and no peer reads its inputs any
// more.
//
// Sums are fp32 for f32, bf16 and f16, in ascending rank, whatever the wire dtype: the same inputs
// give the same bits on every engine and transport. A 16-bit output is rounded once.
//
// Before data moves, the ranks compare sequence, operation, dtype and count; a MismatchError names
// the first difference. Where comparing costs messages, they compare a planned call only the first
// time. A lost peer or a timeout throws PeerLostError or TimeoutError on every rank; after that,
// every call on every Communicator of this world repeats the first error.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/agreement.h"
#include "hsdp/device/stream.h"
#include "hsdp/dtype.h"
#include "hsdp/row_cut.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

// How errors and statistics name a collective: "reduce_scatter of bucket 3".
constexpr int kNoBucket = -1;
struct CallLabel {
  int bucket = kNoBucket;
  // Every rank of the group makes a planned call at the same place in one order, step after step,
  // regardless of the program (a Reducer's bucket calls, for example), and with the same kind of
  // memory: from allocate() or not. It is compared with the peers' calls only the first time. The
  // caller agrees on divisor and exponents elsewhere, and compares call_hash() now and then
  // [Note: planned calls].
  bool planned = false;
  // Static text that names a wait in an all_gather instead of the operation.
  std::string_view act{};
};

// How a sum is computed. kNative: by NCCL, in fp32 whatever the wire dtype. All ranks get the same
// bits, but these depend on more than the inputs. f64 and i64 are always summed in fixed order.
enum class Reduction : std::uint8_t { kExact, kNative };

// The reduce-scatter of the shard hop, with everything that its single pass can do on the way.
struct ReduceScatter {
  ConstTensorView in{};  // cut.count() elements, f32, bf16, f16 or f64 (i64: a plain sum only)
  TensorView out{};      // cut.length(rank) elements; f32 (widening 16 bit) or in.dtype
  std::optional<RowCut> cut{};  // default: RowCut(in.count, size)
  bool accumulate = false;      // out = out + sum, out f32 or f64
  int sum_exponent = 0;         // the sum is multiplied by 2^sum_exponent before the addition
  double divisor = 1.0;         // divides the result, last; in fp32 except for f64
  std::atomic<std::uint32_t>* nonfinite = nullptr;  // set to 1 if an output is not finite
  int bucket = kNoBucket;
  bool planned = false;                     // see CallLabel
  Reduction reduction = Reduction::kExact;  // kNative: engine nccl only
};

// The all-reduce of the replica hop, in place. With a 16-bit `wire`, rows are rounded to it once
// (times 2^-send_exponent) and the total once more (times 2^-(total_exponent - send_exponent)).
// Every rank, even the owner, decodes the same bytes: result = total * 2^total_exponent / divisor.
struct AllReduce {
  TensorView data{};            // f32, bf16, f16, f64 or i64
  std::optional<Dtype> wire{};  // default: data.dtype; bf16 or f16 with f32 data
  int send_exponent = 0;        // k
  int total_exponent = 0;       // K
  double divisor = 1.0;
  std::atomic<std::uint32_t>* nonfinite = nullptr;
  int bucket = kNoBucket;
  bool planned = false;                     // see CallLabel
  Reduction reduction = Reduction::kExact;  // kNative: engine nccl only; no exponents then
};

// Memory that the group's peers on this host read and write directly: a bucket packed here is
// reduced without another copy. Copies share it. On each rank it lives until that rank's last copy
// dies. Zero-initialised and backed by real pages from the start.
class SharedMemory {
 public:
  SharedMemory() = default;
  explicit SharedMemory(std::shared_ptr<void> owner, TensorView view)
      : owner_(std::move(owner)), view_(view) {}
  [[nodiscard]] TensorView view() const { return view_; }
  [[nodiscard]] const std::shared_ptr<void>& owner() const { return owner_; }

 private:
  std::shared_ptr<void> owner_;
  TensorView view_;
};

// How a group's data travels, for stats and logs.
enum class Transport : std::uint8_t { kNone, kInProcess, kSharedMemory, kTcp, kMixed, kNccl, kMpi };
[[nodiscard]] std::string_view name(Transport transport);

enum class CollectiveKind : std::uint8_t {
  kReduceScatter,
  kAllReduce,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kBarrier
};

// What a communicator was asked to do; a group of one counts nothing. `bytes` is the size of the
// whole message in the wire dtype.
struct CollectiveCounts {
  struct PerKind {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;
  };
  std::array<PerKind, 6> kinds{};
  [[nodiscard]] const PerKind& operator[](CollectiveKind kind) const {
    return kinds[static_cast<std::size_t>(kind)];
  }
};

// The size of a sum's message of so many elements: what CollectiveCounts counts.
[[nodiscard]] std::int64_t message_bytes(std::int64_t count, Dtype wire, Reduction reduction);

class Communicator {
 public:
  class Engine;  // hsdp/comm/engine.h

  Communicator() = default;
  explicit Communicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  [[nodiscard]] Transport transport() const;
  [[nodiscard]] std::string_view engine_name() const;  // "host", "nccl", "mpi"
  // The members as ranks of the world that this group was split from.
  [[nodiscard]] const std::vector<int>& world_ranks() const;
  [[nodiscard]] int world_rank(int member) const {
    return world_ranks()[static_cast<std::size_t>(member)];
  }

  void reduce_scatter(const ReduceScatter& args, Stream stream = Stream::inline_host());
  void all_reduce(const AllReduce& args, Stream stream = Stream::inline_host());
  void reduce_scatter(ConstTensorView in, TensorView out, Stream stream = Stream::inline_host());
  void all_reduce(TensorView data, Stream stream = Stream::inline_host());
  // `out` holds cut.count() elements (default: RowCut(out.count, size)). `in` is this rank's row;
  // it may be that place in `out`. Any dtype.
  void all_gather(ConstTensorView in, TensorView out, Stream stream = Stream::inline_host(),
                  std::optional<RowCut> cut = std::nullopt, CallLabel label = {});
  // Row r of `in`, which holds cut.count() elements, goes to rank r. `out` must not overlap `in`
  // and holds size() rows of cut.length(rank()) elements; row r came from rank r. The cut is the
  // same on all ranks, and rows may be empty. Without a cut, rows are equal and the count must be a
  // multiple of size. Any dtype.
  void all_to_all(ConstTensorView in, TensorView out, Stream stream = Stream::inline_host(),
                  std::optional<RowCut> cut = std::nullopt, CallLabel label = {});
  void broadcast(TensorView data, int root = 0, Stream stream = Stream::inline_host());
  void barrier(Stream stream = Stream::inline_host());

  // One small message from every member to every member, in rank order, over the control
  // connection: for agreements, not for data. `act` is one line that says what this rank is about
  // to do, such as "make its Reducer". Only their order identifies messages, so if a rank makes
  // other calls, two kinds of messages may meet. Then all ranks throw a MismatchError that names
  // two acts, and are in step again afterwards.
  [[nodiscard]] std::vector<std::string> exchange(std::string_view message, std::string_view act);
  // What all members say, merged. post() never blocks; collect() gets the result. Use a key once.
  // The agreement holds world ranks.
  void post(const std::string& key, const comm::Saying& mine);
  [[nodiscard]] comm::Agreement collect(const std::string& key, std::string_view operation);
  // Like collect(), but returns nothing if a word has not come within `time`, which is less than
  // the timeout. No rank is at fault then, and you may call it again.
  [[nodiscard]] std::optional<comm::Agreement> collect_within(const std::string& key,
                                                              std::string_view operation,
                                                              std::chrono::milliseconds time);
  // Hash of all planned calls so far: the same on every member, between calls. 0 if the engine
  // compares every call anyway.
  [[nodiscard]] std::uint64_t call_hash() const;
  // Collective, and allowed beside other calls. Call it if hashes differ: it ends the world with
  // the first call that does. Use a key once.
  void compare_calls(const std::string& key);
  // A key unique in the world and equal on every member. All members call it in the same order.
  [[nodiscard]] std::string next_exchange_key();

  // Collective over this group: ranks of one color form a new group, ordered by (key, rank). With a
  // negative color a rank joins no group and gets an empty Communicator (size() == 0).
  [[nodiscard]] Communicator split(int color, int key);
  // Collective, in the same order on every rank; each rank may ask for its own count.
  [[nodiscard]] SharedMemory allocate(std::int64_t count, Dtype dtype);
  // Collective: allocates the extra memory that such calls need now, rather than in the first call.
  // Describe each as it will be called; `out`, factors and the flag are not needed.
  void reserve(std::span<const ReduceScatter> calls);
  void reserve(std::span<const AllReduce> calls);
  // The bytes that reserve() has allocated on this rank; call it between calls.
  [[nodiscard]] std::int64_t reserved_bytes() const;
  // Blocks until `event`, of a stream that runs this group's collectives, is complete. Throws the
  // world's failure if that comes first, or if a GPU hangs in a collective and never completes it.
  void wait(const Event& event);
  // Ends the world for every rank: all pending and later calls throw `reason` as an Error that
  // names this rank. Never blocks.
  void abort(const std::string& reason);

  // Counts since the group was made. Copies of a Communicator share them.
  [[nodiscard]] CollectiveCounts stats() const;

  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }
  explicit operator bool() const { return engine_ != nullptr; }

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace hsdp
