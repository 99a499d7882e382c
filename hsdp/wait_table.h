// Who waited for whom: which rank comes late to the collectives of a mesh.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hsdp {

// Compares one Reducer's shard hops, replica hops, gathers, norms and ends of microbatches that
// every rank of their group still has among its last 1,000 operations, of any Reducer and kind. The
// ranks that begin one earlier wait for the last. If the last rank had waited in another operation
// before, that time counts for the rank it had waited for, or is unexplained if that operation was
// not compared: it is of another Reducer, or a gather with results over the mesh. The record does
// not have what other code waits for: time in calls of a Communicator, snapshots or other libraries
// counts as the rank's own. On a GPU hosts wait for each other at ends of microbatches only.
struct WaitTable {
  struct Wait {
    int waiting = 0;  // ranks of the mesh
    int awaited = 0;
    double seconds = 0;
  };
  std::vector<Wait> waits;      // each pair once, ascending; none shorter than the clocks' error
  std::int64_t operations = 0;  // that were compared
  std::int64_t steps = 0;       // of these operations
  double span_s = 0;            // from the begin of the oldest one to that of the newest
  // Of the time between two ranks, at most, for the oldest operation: clocks may drift by 100 ppm.
  double clock_error_s = 0;
  double unexplained_s = 0;  // waits whose cause is not known, of all ranks
  // The rank that was waited for longest, if any was.
  std::optional<int> straggler;

  // "rank 2 was waited for 1.83 s by 3 ranks in 412 operations, 20 steps, 31.20 s (clock error
  // 0.04 ms)"; in the parentheses also ", 0.51 s of waits unexplained" if there are any.
  [[nodiscard]] std::string text() const;
};

}  // namespace hsdp
