// Sums gradients that something else has scattered, FSDP2 for one, over the backwards of a step and
// in its last one over the replicas.
//
// A row is one module's gradients, as far as this shard rank has them. The status words, the
// arithmetic and the replica hop are a Reducer's; there are no buckets, staging or lanes, as each
// module's total is wanted at once, on the caller's stream, in the order of the backward
// [Note: rows of others].
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
// Threads: one call at a time. Collective: construction, set_requires_all_reduce, begin_finish,
// end_finish, end_backward of a step's last backward and, in one order on all ranks, reduce.
// Streams: rows are read and totals written in the order of the `stream` of the call, which waits
// for what earlier calls have put on others; on the host they are when the call returns.
// Errors: ranks that are not in the same backward, or have other flags, get a MismatchError before
// anything is summed, and the step is dropped. Rows in another order, or of sums of other ranks,
// are a MismatchError at the end of the step's last backward, and end the world. A rank drops a
// step between backwards, or before it has reduced anything in one; the others get a
// StepAbortedError at their next reduce. After that what goes wrong in a backward ends the world.
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
  // Where they lie in this rank's row; `parameter` is an index into the above. Gaps are padding.
  std::vector<ParameterRange> ranges{};
  std::int64_t count = 0;    // of elements in the row
  Dtype wire = Dtype::kF32;  // what the hop sends, where it brings none along
};

struct Row {
  TensorView values{};  // f32, bf16 or f16, contiguous; without data: no fresh gradient
  int shard_size = 1;   // how many ranks' gradients are summed in it; 1 where it is their mean
};

class RowReducer {
 public:
  // Groups and hop are the same on all ranks, MismatchError where they are not. No hop: PlainHop.
  RowReducer(const Mesh& mesh, std::vector<RowGroup> groups, std::shared_ptr<ReplicaHop> hop = {});
  // Drops a step that is begun; waits for no other rank, also where it has just dropped another.
  ~RowReducer();
  RowReducer(RowReducer&&) noexcept;
  RowReducer& operator=(RowReducer&&) noexcept;

  // Other parameters in the same groups, before the first row of a step. Local: ranks whose
  // parameters differ get a MismatchError in their next reduce().
  void set_groups(std::vector<RowGroup> groups);
  [[nodiscard]] bool begins_step() const;  // the next row is the first of a step

  // Before each backward: whether those groups go over the replicas in it, with all that was kept.
  // True until it is first called. The step's last backward is the first in which every group does.
  void set_requires_all_reduce(bool flag, std::span<const int> groups);
  [[nodiscard]] bool requires_all_reduce(int group) const;

  // Adds a row to what is kept of the group, in fp32.
  void keep(int group, const Row& row, const Stream& stream);
  // total = (what is kept + row, summed over the replicas) / (their number), in fp32; it may be the
  // row's own memory. Nothing is kept after it.
  void reduce(int group, const Row& row, TensorView total, Stream& stream);
  // A row came that cannot be given to reduce(): the step is dropped, or the world ends.
  void reject(std::string_view message);
  // A backward that reduced something is over. In the step's last one, ranks see whether all have
  // reduced the same rows.
  void end_backward();
  // The same, before abandon_step() or close() where the backward may be over: waits for nobody.
  void leave_backward();

  // Ends a step. Returns the groups of which some rank has kept rows, as they did not run in the
  // last backward: they are to be reduced now, without a fresh gradient. Then end_finish().
  [[nodiscard]] std::vector<int> begin_finish();
  void end_finish();
  // Drops the step on all ranks; nothing where none is begun. From inside a backward that has
  // reduced something it ends the world.
  void abandon_step(std::string_view reason) noexcept;
  // What the destructor does, now; no other call but the destructor may follow.
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
