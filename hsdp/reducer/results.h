// Reads a Reducer's results and partials: shards, full gradients, the norm and clipping, found_inf,
// snapshots. What computes something runs on the Reducer's lane, after everything it has launched.
//
// Forms that write to memory return an Event. Host: they wait for nothing; the Event throws where
// the step was dropped or the world failed. GPU: they wait for the status words and throw
// themselves; the Event is the device's, and the caller's stream waits for it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/reducer/slice_gather.h"
#include "hsdp/reducer/steps.h"
#include "hsdp/snapshot.h"
#include "hsdp/snapshot/digest_log.h"

namespace hsdp::reducer {

class Results {
 public:
  // All of these outlive it.
  Results(const ReducerOptions& options, ParameterTable& parameters, Groups& groups, Steps& steps,
          std::string snapshot_id, MemoryCount memory);

  [[nodiscard]] std::vector<int> unused_parameters(std::string_view call);
  [[nodiscard]] TensorView shard(int parameter);
  [[nodiscard]] std::vector<float> partial_shard(int parameter);
  void partial_shard(int parameter, TensorView out);
  [[nodiscard]] std::vector<float> local_sum(int parameter);
  void local_sum(int parameter, TensorView out);
  [[nodiscard]] Slice slice(int parameter);
  [[nodiscard]] Slice shard_slice(int parameter);
  [[nodiscard]] const BucketLayout& layout();
  void gather_gradients(std::span<const NamedArray> arrays);
  void gather_parameters(std::span<const NamedArray> arrays);

  [[nodiscard]] double grad_norm();
  Event grad_norm(TensorView out);
  // One norm over several Reducers of a mesh.
  [[nodiscard]] static double clip_grad_norm(std::span<Results* const> all, double max_norm);
  static Event clip_grad_norm(std::span<Results* const> all, double max_norm, TensorView norm);
  // `call`: on whose behalf, for messages.
  static Event clip_factor(std::span<Results* const> all, double max_norm, TensorView norm,
                           TensorView factor, std::string_view call);
  [[nodiscard]] bool found_inf();
  Event found_inf(TensorView out);

  void save_snapshot(const std::filesystem::path& path, std::int64_t step);
  void save_digest(const std::filesystem::path& folder, std::int64_t step);
  void flush_snapshots() { snapshots_.flush(); }
  void close_files() {
    digests_.reset();
    snapshots_.flush();
  }

  [[nodiscard]] std::int64_t all_gather_count() const { return all_gather_count_; }

 private:
  using Task = std::function<void(Stream&)>;
  using Scope = Lane::Scope;

  // Runs it on the lane, after what the caller's stream did so far and, on a GPU, before what that
  // does next.
  Event run(Scope scope, std::int64_t step, Task task);
  void run_now(Scope scope, Task task);  // the same; on the host it has run when this returns
  void await(const Event& done) const;   // on the caller's thread
  void gather(const std::vector<FullArray>& arrays, Stream& stream);  // in a task
  Event add_squares(std::shared_ptr<double> sum, std::vector<Event> after);
  template <typename Compute>
  void read(const TensorView& out, const Compute& compute);

  [[nodiscard]] std::int64_t last_step() const;
  // Waits for the step's result. After a failure the last finished one stays readable.
  void require_result(std::string_view call);
  // That there is one, or will be when the words are in: on a GPU, waits for those.
  void expect_result(std::string_view call);
  [[nodiscard]] UsageError no_result(std::string_view call) const;
  void require_ended_step(std::string_view call);
  void require_no_local_sums(std::string_view call) const;
  void require_partial();
  // UsageError unless a result of `count` elements may be written to `out`.
  void require_output(const TensorView& out, Dtype dtype, std::int64_t count,
                      std::string_view call) const;
  [[nodiscard]] TensorView own_slice(int parameter) const;
  [[nodiscard]] static UsageError no_partial(std::string_view call);
  [[nodiscard]] std::vector<SnapshotEntry> snapshot_entries(Buffer& copies);
  [[nodiscard]] Buffer gather_replica_parts(std::vector<SnapshotEntry>& entries);
  [[nodiscard]] std::vector<std::byte> copy_to_host(std::vector<SnapshotEntry>& entries,
                                                    std::vector<SnapshotState>& hop_state);

  const ReducerOptions& options_;
  ParameterTable& parameters_;
  Groups& groups_;
  Steps& steps_;
  std::string snapshot_id_;
  std::int64_t all_gather_count_ = 0;
  MemoryCount memory_;
  SnapshotWriter snapshots_;
  std::optional<DigestWriter> digests_;
};

}  // namespace hsdp::reducer
