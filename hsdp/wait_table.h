// Who waited for whom: which rank comes late to the collectives of a mesh.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hsdp {

// Covers the shard hops, replica hops, gathers and microbatch ends that every rank of their group
// still has in its record. Each rank waited for the last one to begin, from its own beginning on.
// If that rank was late because it waited for another, the other one counts. On a GPU hosts wait
// for each other only at the ends of microbatches.
struct WaitTable {
  struct Wait {
    int waiting = 0;  // ranks of the mesh
    int awaited = 0;
    double seconds = 0;
  };
  std::vector<Wait> waits;      // each pair once, ascending; none shorter than the clocks' error
  std::int64_t operations = 0;  // that were compared
  double clock_error_s = 0;     // of the time between two ranks, at most
  // The rank that was waited for longest, if any was.
  std::optional<int> straggler;

  // "rank 2 was waited for 1.83 s by 3 ranks in 412 operations (clock error 0.04 ms)"
  [[nodiscard]] std::string text() const;
};

}  // namespace hsdp
