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

// The Reducer's name in messages that other ranks see.
[[nodiscard]] std::string title(const ReducerOptions& options);

// Fills in the default hop and the default bucket_bytes for that many ranks.
[[nodiscard]] ReducerOptions with_defaults(ReducerOptions options, Device device, int rank_count);

// Collective over the world. A rank whose options are wrong gets a UsageError, and the others a
// StepAbortedError that names it. If options differ, every rank gets a MismatchError.
[[nodiscard]] AgreedOptions agree_on_options(ReducerOptions options, Device device,
                                             Communicator& world);

// UsageError for a ReplicaHop::describe() that does not fit into one line of a message or into a
// snapshot.
void check_description(const std::string& text);

}  // namespace hsdp::reducer
