// A group of ranks and its collectives; sums only [Note: why all-to-all and our own sum].
//
// Every collective is called by every rank of the group in the same order; calls on one
// Communicator are ordered by the stream they are given, and two streams never drive one
// Communicator at the same time (split a second one). With `Stream::inline_host()` a call returns
// when it is complete; with an asynchronous stream it returns at once and the memory must stay
// valid until the stream has passed it. A collective is complete on a rank when its outputs are
// written and no peer reads its inputs any more.
//
// Sums are fp32 for f32, bf16 and f16, in ascending rank, whatever travels: same inputs, same bits,
// on every engine and transport. A 16-bit output is rounded once.
//
// Before data moves the ranks compare sequence, operation, dtype and count: MismatchError names
// the first difference. They compare a planned call only the first time, where that costs messages.
// A lost peer or a timeout throws PeerLostError or TimeoutError on every rank; after that every
// call on every Communicator of this world repeats the first error.
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

// What a collective is called in errors and statistics: "reduce_scatter of bucket 3".
constexpr int kNoBucket = -1;
struct CallLabel {
  int bucket = kNoBucket;
  // Every rank of the group makes it at the same place in one order, step after step, whatever the
  // program around it does, as a Reducer does its buckets', and with memory of one kind: of
  // allocate() or not. It is compared with the peers' the first time only. The caller has its
  // divisor and exponents agreed elsewhere, and compares call_hash() now and then
  // [Note: planned calls].
  bool planned = false;
  // What a wait in an all_gather is called, in place of the operation; static text.
  std::string_view act{};
};

// How a sum is computed. kNative: by NCCL, in fp32 whatever the wire dtype; all ranks get the same
// bits, but which ones depends on more than the inputs. f64 and i64 are summed in fixed order
// always.
enum class Reduction : std::uint8_t { kExact, kNative };

// The reduce-scatter of the shard hop, with everything that its one pass can carry along.
struct ReduceScatter {
  ConstTensorView in{};  // cut.count() elements, f32, bf16, f16 or f64 (i64: a plain sum only)
  TensorView out{};      // cut.length(rank) elements; f32 (widening 16 bit) or in.dtype
  std::optional<RowCut> cut{};  // default: RowCut(in.count, size)
  bool accumulate = false;      // out = out + sum, out f32 or f64
  int sum_exponent = 0;         // the sum times 2^sum_exponent, before the addition
  double divisor = 1.0;         // the result divided by this, last; in fp32 but for f64
  std::atomic<std::uint32_t>* nonfinite = nullptr;  // set to 1 when an output is not finite
  int bucket = kNoBucket;
  bool planned = false;                     // see CallLabel
  Reduction reduction = Reduction::kExact;  // kNative: engine nccl only
};

// The all-reduce of the replica hop, in place. With a 16-bit `wire` the rows are rounded once to it
// (times 2^-send_exponent), the total once more (times 2^-(total_exponent - send_exponent)), and
// every rank, the owner too, decodes the same bytes: result = total * 2^total_exponent / divisor.
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
// reduced with no further copy. Copies share it; it lives until the last copy dies, on each rank
// for itself. Zero-initialised and backed by real pages when it is made.
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

// Which way the bytes of a group go, for stats and logs.
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

// What a communicator was asked to do; a group of one asks for nothing. `bytes` is the size of the
// whole message in the dtype that travels.
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

class Communicator {
 public:
  class Engine;  // hsdp/comm/engine.h

  Communicator() = default;
  explicit Communicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  [[nodiscard]] Transport transport() const;
  [[nodiscard]] std::string_view engine_name() const;  // "host", "nccl", "mpi"
  // The members as ranks of the world this was split from.
  [[nodiscard]] const std::vector<int>& world_ranks() const;
  [[nodiscard]] int world_rank(int member) const {
    return world_ranks()[static_cast<std::size_t>(member)];
  }

  void reduce_scatter(const ReduceScatter& args, Stream stream = Stream::inline_host());
  void all_reduce(const AllReduce& args, Stream stream = Stream::inline_host());
  void reduce_scatter(ConstTensorView in, TensorView out, Stream stream = Stream::inline_host());
  void all_reduce(TensorView data, Stream stream = Stream::inline_host());
  // out holds cut.count() elements, default cut RowCut(out.count, size); `in` is this rank's row
  // and may be that place in `out` itself. Any dtype.
  void all_gather(ConstTensorView in, TensorView out, Stream stream = Stream::inline_host(),
                  std::optional<RowCut> cut = std::nullopt, CallLabel label = {});
  // Row r of `in`, which holds cut.count() elements, goes to rank r. `out` lies apart from it and
  // holds size() rows of cut.length(rank()) elements each; row r came from rank r. The cut is the
  // same on all ranks, rows may be empty. Without one rows are equal, and the count is a multiple
  // of size. Any dtype.
  void all_to_all(ConstTensorView in, TensorView out, Stream stream = Stream::inline_host(),
                  std::optional<RowCut> cut = std::nullopt, CallLabel label = {});
  void broadcast(TensorView data, int root = 0, Stream stream = Stream::inline_host());
  void barrier(Stream stream = Stream::inline_host());

  // One small message from every member to every member, in rank order, over the control
  // connection: for agreements, not for data. `act` is one line that says what this rank is about
  // to do, as in "make its Reducer": messages are told apart by their order only, and where a rank
  // makes other calls, two of different kinds meet. All ranks get a MismatchError that names two
  // acts then, and are in step after it.
  [[nodiscard]] std::vector<std::string> exchange(std::string_view message, std::string_view act);
  // What all members say, merged, in two halves: post() never blocks. A key is used once. Ranks in
  // the agreement are the world's.
  void post(const std::string& key, const comm::Saying& mine);
  [[nodiscard]] comm::Agreement collect(const std::string& key, std::string_view operation);
  // As collect(), but nothing when a word has not come after `time`, less than the timeout: nobody
  // is at fault then, and it may be called again.
  [[nodiscard]] std::optional<comm::Agreement> collect_within(const std::string& key,
                                                              std::string_view operation,
                                                              std::chrono::milliseconds time);
  // Of all planned calls so far: the same on every member, between calls. 0 where the engine
  // compares each of them anyway.
  [[nodiscard]] std::uint64_t call_hash() const;
  // Collective, beside other calls, where hashes differ: ends the world with the first call that
  // does. A key is used once.
  void compare_calls(const std::string& key);
  // A key that is unique in the world and the same on every member, which all make it in turn.
  [[nodiscard]] std::string next_exchange_key();

  // Collective over this group: ranks of one color form a new group, ordered by (key, rank).
  // A negative color joins no group and gets an empty Communicator (size() == 0).
  [[nodiscard]] Communicator split(int color, int key);
  // Collective, in the same order on every rank; each rank may ask for its own count.
  [[nodiscard]] SharedMemory allocate(std::int64_t count, Dtype dtype);
  // Collective: takes the memory that such calls need beside their arguments now, rather than in
  // the first of them. Each is as it will be called, but for `out`, factors and the flag.
  void reserve(std::span<const ReduceScatter> calls);
  void reserve(std::span<const AllReduce> calls);
  // What it took so, on this rank; between calls.
  [[nodiscard]] std::int64_t reserved_bytes() const;
  // Blocks until `event` of a stream that this group's collectives run on is complete. Throws the
  // world's failure when it comes first, or when a GPU that hangs in a collective never gets there.
  void wait(const Event& event);
  // Ends the world for every rank: all pending and later calls throw `reason` as an Error naming
  // this rank. Never blocks.
  void abort(const std::string& reason);

  // Since the group was made. Copies of a Communicator count together.
  [[nodiscard]] CollectiveCounts stats() const;

  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }
  explicit operator bool() const { return engine_ != nullptr; }

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace hsdp
