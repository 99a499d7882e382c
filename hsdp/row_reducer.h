// Sums gradients that another library, such as FSDP2, has reduce-scattered: over the backwards of a
// step, and in its last one over the replicas.
//
// A row is this shard rank's part of one module's gradients. Status words, arithmetic and replica
// hop are those of a Reducer. There are no buckets, staging or lanes, as the caller needs each
// module's total at once, on its stream, in the order of the backward [Note: rows of others].
//
//   RowReducer rows(mesh, groups, hop);
//   for (int m = 0; m < 4; ++m) {
//     rows.set_requires_all_reduce(m == 3, all_groups);
//     for (each group, in the order of the backward) {
//       if (rows.requires_all_reduce(g)) rows.reduce(g, row, total, stream);
//       else rows.keep(g, row, stream);
//     }
//     rows.end_backward();
//   }
//   for (const int g : rows.begin_finish()) rows.reduce(g, {}, total, stream);
//   rows.end_finish();
//
// Threads: one call at a time.
// Collective: construction, set_requires_all_reduce, begin_finish, end_finish, end_backward of a
// step's last backward and, in one order on all ranks, reduce. Everything else is local.
// Streams: rows are read and totals written in the order of the call's `stream`, which waits for
// the work of earlier calls on other streams; on the host they are when the call returns.
// Errors: ranks in different backwards, or with different flags, get a MismatchError before
// anything is summed, and the step is dropped. Rows in another order, or of other shard sizes, are
// a MismatchError at the end of the step's last backward, and end the world. A rank can drop a step
// between backwards, or in a backward before it has reduced anything; the others get a
// StepAbortedError at their next reduce. After that an error in a backward ends the world.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/device/stream.h"
#include "hsdp/mesh.h"
#include "hsdp/replica_hop.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

// The parameters of one module.
struct RowGroup {
  std::string name{};
  std::vector<HopParameter> parameters{};
  // Where they lie in this rank's row; `parameter` is an index into `parameters`. Gaps are padding.
  std::vector<ParameterRange> ranges{};
  std::int64_t count = 0;    // of elements in the row
  Dtype wire = Dtype::kF32;  // what the hop sends, if it has no wire()
};

struct Row {
  TensorView values{};  // f32, bf16 or f16, contiguous; without data: no fresh gradient
  int shard_size = 1;   // of how many ranks' gradients it is the sum; 1 for their mean
};

class RowReducer {
 public:
  // All must be the same on all ranks; MismatchError if not. Without a hop: PlainHop.
  // `verify_every`: in every Nth step the replicas compare the bits of their totals; 0: in none. If
  // they differ, end_finish() or the next step's first reduce() throws a MismatchError.
  RowReducer(const Mesh& mesh, std::vector<RowGroup> groups, std::shared_ptr<ReplicaHop> hop = {},
             std::int64_t verify_every = 0);
  // Drops a step that is begun. Waits for no other rank, even after another drop.
  ~RowReducer();
  RowReducer(RowReducer&&) noexcept;
  RowReducer& operator=(RowReducer&&) noexcept;

  // Changes the parameters of the groups, before the first row of a step. Local: ranks whose
  // parameters differ get a MismatchError in their next reduce().
  void set_groups(std::vector<RowGroup> groups);
  [[nodiscard]] bool begins_step() const;  // the next row is the first of a step

  // Before each backward: whether those groups, with their kept rows, go over the replicas in it.
  // True until the first call. The step's last backward is the first in which every group does.
  void set_requires_all_reduce(bool flag, std::span<const int> groups);
  [[nodiscard]] bool requires_all_reduce(int group) const;

  // Adds a row to the group's kept rows, in fp32.
  void keep(int group, const Row& row, const Stream& stream);
  // total = (kept rows + row, summed over the replicas) / (their number), in fp32. `total` may be
  // the row's memory. Forgets the kept rows.
  void reduce(int group, const Row& row, TensorView total, Stream& stream);
  // Reports a row that cannot be given to reduce(): drops the step, or ends the world.
  void reject(std::string_view message);
  // Ends a backward that reduced something. In the step's last one, checks that all ranks have
  // reduced the same rows.
  void end_backward();
  // As end_backward(), for a caller that calls abandon_step() or close() next; the backward need
  // not be over. Does not wait for other ranks.
  void leave_backward();

  // Ends a step. Returns the groups of which some rank still has kept rows, as they did not run in
  // the last backward. Reduce them now, without a fresh gradient, then call end_finish().
  [[nodiscard]] std::vector<int> begin_finish();
  void end_finish();
  // Drops the step on all ranks, if one is begun. Inside a backward that has reduced something it
  // ends the world.
  void abandon_step(std::string_view reason) noexcept;
  // As the destructor. Only the destructor may follow.
  void close();

  [[nodiscard]] std::int64_t count(int group) const;  // of elements in its rows
  [[nodiscard]] bool keeps(int group) const;
  [[nodiscard]] std::int64_t kept_bytes() const;
  [[nodiscard]] std::int64_t all_reduce_count() const;   // rows that went over the replicas
  [[nodiscard]] std::int64_t replica_hop_bytes() const;  // that the hop's groups were given to send

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp
