// The last operations of this rank: hops, gathers, words, waits, and when each began and ended.
//
// An OperationRecord is the ring of a world. A Reducer or a lane writes to it through its
// Operations, which also add up how long each kind took; an Operation is one of them, from its
// construction on. Recording is always on and takes no lock and no memory. While a trace runs it
// takes both: every operation is kept then, not the last ones only.
// [Note: a record that nobody waits for]
//
// Threads: everything may be called from any thread; one Operation belongs to one at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/device/event.h"

namespace hsdp {

enum class OperationKind : std::uint8_t {
  kPack,        // of one bucket: from its first gradient to its last
  kShardHop,    // of one bucket
  kReplicaHop,  // of one bucket
  kGather,      // of parameters or gradients
  kNorm,        // its sum over the ranks
  kWord,        // until all ranks have said how a microbatch ended
  kUpdate,      // of an optimizer
  kWait,        // of the calling thread, for the library
};
constexpr std::size_t kOperationKinds = 8;
[[nodiscard]] std::string_view name(OperationKind kind);  // "shard_hop"

enum class OperationState : std::uint8_t {
  kBegun,
  kIssued,  // a GPU or another thread has the rest
  kDone,
  kFailed,
};
[[nodiscard]] std::string_view name(OperationState state);  // "begun"

// Which one it is. The same on all ranks that take part in it, but for `bytes`.
struct OperationPlace {
  OperationKind kind = OperationKind::kWait;
  std::int64_t step = -1;
  std::int64_t microbatch = -1;
  // Of a lane's tasks, a Reducer's words, or its norms and gathers of a step: ranks count it alike.
  std::int64_t turn = -1;
  int index = -1;          // a bucket or a unit
  std::int64_t bytes = 0;  // of this rank's input
};

[[nodiscard]] std::string range_name(const OperationPlace& place);  // "shard_hop 12"

// Times are seconds of the steady clock.
struct RecordedOperation {
  std::int64_t number = 0;
  int source = 0;
  OperationPlace place{};
  OperationState state = OperationState::kBegun;
  double begin_s = 0;
  double end_s = 0;  // 0 while it is begun
};

// A Reducer or a lane, and the job ranks of its mesh in their order.
struct OperationSource {
  std::string name{};
  int replicate = 1;
  int shard = 1;
  std::vector<int> ranks{};
  // The Reducer's, and the lane's among the Reducer's: the same on all ranks, used once in a job.
  std::string key{};
  std::string lane_key{};
};

class OperationRecord {
 public:
  static constexpr std::size_t kCapacity = 1000;

  // Forgets the oldest sources that are gone where there are many.
  [[nodiscard]] std::shared_ptr<const int> add_source(OperationSource source);
  [[nodiscard]] std::int64_t begin(int source, const OperationPlace& place, double now_s);
  // Of one that was overwritten meanwhile: nothing.
  void end(std::int64_t number, OperationState state, double now_s);

  struct Contents {
    std::vector<RecordedOperation> operations;  // oldest first
    std::map<int, OperationSource> sources;
    std::string job;
  };
  // Names this job, unless it has a name already, and returns the name. It tells the job's files
  // from those of other jobs.
  std::string name_job(const std::string& name);
  // Leaves out what is being written just now.
  [[nodiscard]] Contents read() const;

  // From now on keeps all operations that begin, up to kMostTraced, until take_trace(). False if a
  // trace runs already.
  static constexpr std::size_t kMostTraced = 65'536;
  [[nodiscard]] bool start_trace();
  struct Trace {
    Contents contents;
    std::int64_t dropped_count = 0;  // those that came after kMostTraced
  };
  [[nodiscard]] Trace take_trace();

 private:
  static constexpr std::int64_t kNoNumber = -1;
  static constexpr std::int64_t kWriting = -2;  // the rest of a slot
  struct Slot {
    std::atomic<std::int64_t> number{kNoNumber};
    std::atomic<std::int64_t> step, microbatch, turn, bytes;
    std::atomic<double> begin_s, end_s;
    std::atomic<int> index, source;
    std::atomic<OperationKind> kind;
    std::atomic<OperationState> state;
  };
  // Takes the slot to write to it. False if it has another number by now.
  [[nodiscard]] static bool claim(Slot& slot, std::int64_t number);
  struct Source {
    OperationSource is;
    std::weak_ptr<const int> user;
  };
  void trace_begin(const RecordedOperation& one);
  void trace_end(std::int64_t number, OperationState state, double now_s);
  [[nodiscard]] std::map<int, OperationSource> sources() const;

  std::array<Slot, kCapacity> slots_;
  std::atomic<std::int64_t> next_{0};
  mutable std::mutex mutex_;
  std::map<int, Source> sources_;
  int next_source_ = 0;
  std::string job_;

  std::atomic<bool> is_traced_{false};
  std::mutex trace_mutex_;                            // guards the following
  std::map<std::int64_t, RecordedOperation> traced_;  // by number
  std::int64_t dropped_count_ = 0;
};

// Copies write as the same source and add to the same times.
class Operations {
 public:
  Operations() = default;  // records nothing
  Operations(std::shared_ptr<OperationRecord> record, OperationSource source);
  // The same times under another name, for a lane of the same Reducer.
  [[nodiscard]] Operations of(const std::string& name, const std::string& lane_key) const;
  [[nodiscard]] const OperationSource& source() const { return is_; }

  [[nodiscard]] static double now_s();
  // For what begins and ends in different places, and is no time of one thread.
  [[nodiscard]] std::int64_t begin(const OperationPlace& place, double at_s = now_s()) const;
  void end(std::int64_t number, OperationState state, double at_s = now_s()) const;
  void add(OperationKind kind, double seconds) const;
  [[nodiscard]] double seconds(OperationKind kind) const;

  // Calls `wait`, and records that where the event is not complete yet.
  template <typename Wait>
  void await(const Event& event, const Wait& wait) const;

 private:
  using Times = std::array<std::atomic<double>, kOperationKinds>;

  std::shared_ptr<OperationRecord> record_;
  OperationSource is_;
  std::shared_ptr<const int> source_;
  std::shared_ptr<Times> times_;
};

// Ends with the scope: failed where an exception leaves it, else done. A profiler sees it as
// "hsdp:shard_hop 12" on the thread that began it, until it ends or is moved.
class Operation {
 public:
  Operation(const Operations& operations, const OperationPlace& place);
  ~Operation();
  Operation(Operation&& other) noexcept;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  Operation& operator=(Operation&&) = delete;

  void end(OperationState state) noexcept;

 private:
  void name_for_profiler(const OperationPlace& place);
  void leave_profiler() noexcept;

  const Operations* operations_;  // null once it has ended
  OperationKind kind_;
  double begin_s_;
  std::int64_t number_;
  int exceptions_;
  bool is_named_ = false;  // for a profiler: on the thread that has begun it
};

template <typename Wait>
void Operations::await(const Event& event, const Wait& wait) const {
  if (event.complete()) return wait();
  const Operation waiting(*this, {.kind = OperationKind::kWait});
  wait();
}

}  // namespace hsdp
