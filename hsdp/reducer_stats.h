// What a Reducer has done and holds on this rank, and its state. Plain data. Reducer::stats() and
// Reducer::state() return them; both calls are local.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hsdp/comm/control_link_stats.h"

namespace hsdp {

struct ReducerStats {
  int bucket_count = 0;
  std::int64_t microbatch_count = 0;  // since construction
  std::int64_t step_count = 0;        // finished steps
  std::int64_t begun_step_count = 0;  // dropped steps included
  std::int64_t reduce_scatter_count = 0;
  std::int64_t all_reduce_count = 0;  // replica hops
  std::int64_t all_gather_count = 0;
  // What this process sent over the control connection of its world, without beats; a rank that
  // relays also counts what it passed on. control_links has these by link, and what was received.
  std::int64_t control_message_count = 0;
  std::int64_t control_bytes = 0;
  std::vector<ControlLinkStats> control_links;
  std::int64_t shard_hop_bytes = 0;  // of this rank's buckets, in the wire dtype
  // Of this rank's messages in both halves of the hop, in the wire dtype. An all-reduce counts
  // twice. On a GPU each found_inf(out) adds 8.
  std::int64_t replica_hop_bytes = 0;
  // On a GPU: bytes of gradients, local sums and rows that were read 2 or 4 at a time, which is
  // slow, as they are not aligned to 16 bytes like their destination.
  std::int64_t misaligned_bytes = 0;
  // Seconds that threads of this rank spent, including waits for peers. On a GPU the time of the
  // host, which only issues the work.
  double pack_s = 0;
  double shard_hop_s = 0;
  double replica_hop_s = 0;
  double gather_s = 0;
  double update_s = 0;   // of zero::AdamW
  double waiting_s = 0;  // for which calls blocked the calling threads

  std::int64_t carry_bytes = 0;        // fp32 or f64 carry, also the result
  std::int64_t total_bytes = 0;        // totals of groups with sync = all before the step's end
  std::int64_t staging_bytes = 0;      // two buckets
  std::int64_t accumulator_bytes = 0;  // full-size, sync = none
  std::int64_t replica_hop_state_bytes = 0;
  std::int64_t retained_bytes = 0;  // gradients kept by reference until there is staging
  std::int64_t peak_retained_bytes = 0;
  std::int64_t snapshot_bytes = 0;          // copies not yet written, and one kept for the next
  std::int64_t optimizer_bytes = 0;         // moments and masters of slices
  std::int64_t parameter_gather_bytes = 0;  // messages of gathers of small arrays
  std::int64_t scratch_bytes = 0;           // on a GPU: what kernels and collectives work in
  std::int64_t resident_bytes = 0;          // sum of the above, without retained gradients
  std::int64_t peak_resident_bytes = 0;

  std::string engine;
  std::string reduction;
  std::string replica_hop;
  std::string shard_transport;
  std::string replica_transport;
};

// Calls visit(name, value) for every field but control_links, in their order.
template <typename Visit>
void visit_fields(const ReducerStats& stats, Visit visit) {
  visit("bucket_count", stats.bucket_count);
  visit("microbatch_count", stats.microbatch_count);
  visit("step_count", stats.step_count);
  visit("begun_step_count", stats.begun_step_count);
  visit("reduce_scatter_count", stats.reduce_scatter_count);
  visit("all_reduce_count", stats.all_reduce_count);
  visit("all_gather_count", stats.all_gather_count);
  visit("control_message_count", stats.control_message_count);
  visit("control_bytes", stats.control_bytes);
  visit("shard_hop_bytes", stats.shard_hop_bytes);
  visit("replica_hop_bytes", stats.replica_hop_bytes);
  visit("misaligned_bytes", stats.misaligned_bytes);
  visit("pack_s", stats.pack_s);
  visit("shard_hop_s", stats.shard_hop_s);
  visit("replica_hop_s", stats.replica_hop_s);
  visit("gather_s", stats.gather_s);
  visit("update_s", stats.update_s);
  visit("waiting_s", stats.waiting_s);
  visit("carry_bytes", stats.carry_bytes);
  visit("total_bytes", stats.total_bytes);
  visit("staging_bytes", stats.staging_bytes);
  visit("accumulator_bytes", stats.accumulator_bytes);
  visit("replica_hop_state_bytes", stats.replica_hop_state_bytes);
  visit("retained_bytes", stats.retained_bytes);
  visit("peak_retained_bytes", stats.peak_retained_bytes);
  visit("snapshot_bytes", stats.snapshot_bytes);
  visit("optimizer_bytes", stats.optimizer_bytes);
  visit("parameter_gather_bytes", stats.parameter_gather_bytes);
  visit("scratch_bytes", stats.scratch_bytes);
  visit("resident_bytes", stats.resident_bytes);
  visit("peak_resident_bytes", stats.peak_resident_bytes);
  visit("engine", stats.engine);
  visit("reduction", stats.reduction);
  visit("replica_hop", stats.replica_hop);
  visit("shard_transport", stats.shard_transport);
  visit("replica_transport", stats.replica_transport);
}

// The state of a Reducer on this rank.
struct ReducerState {
  enum class Phase : std::uint8_t { kIdle, kCollecting, kFailed, kClosed };
  Phase phase = Phase::kIdle;   // kCollecting: a microbatch is open
  std::int64_t step = -1;       // the number of the last step that began; -1: none has
  bool step_begun = false;      // it has neither ended nor been dropped
  bool step_dropped = false;    // this rank knows that it was dropped
  std::int64_t microbatch = 0;  // the number of its microbatches that have ended
  bool pending = false;         // these are not in a result yet
  bool window_open = false;     // a window is open, in which microbatches only delimit passes
  bool word_under_way = false;  // the ranks have not agreed on the last status word yet
};

}  // namespace hsdp
