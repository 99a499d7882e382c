// What the ranks compare when a Reducer is made: its options.
#pragma once

#include <string>

#include "hsdp/comm/communicator.h"
#include "hsdp/reducer_options.h"

namespace hsdp::reducer {

struct AgreedOptions {
  ReducerOptions options;   // with a hop, bucket_bytes, and the dtype that the hop sends
  std::string snapshot_id;  // random, the same on every rank
};

// With a hop, and the default bucket_bytes of a mesh.
[[nodiscard]] ReducerOptions with_defaults(ReducerOptions options, Device device, int rank_count);

// Collective over the world. Options that are wrong on one rank are a UsageError there, and a
// StepAbortedError naming it on the others; options that differ are a MismatchError on all.
[[nodiscard]] AgreedOptions agree_on_options(ReducerOptions options, Device device,
                                             Communicator& world);

// UsageError for a ReplicaHop::describe() that does not travel in a line of text or cannot stand in
// a snapshot.
void check_description(const std::string& text);

}  // namespace hsdp::reducer
