// The demo's claims. Each one runs what it needs and measures it; it throws if that cannot run.
#pragma once

#include <vector>

#include "examples/demo/demo_runs.h"
#include "examples/demo/screen.h"
#include "examples/digits/training_result.h"

namespace examples {

// The training on the mesh follows the one in a single process.
[[nodiscard]] Claim loss_claim(const TrainingResult& mesh, const TrainingResult& alone);
[[nodiscard]] Claim accuracy_claim(const TrainingResult& mesh, const TrainingResult& alone);
// 4 reduce-scatters and 1 all-reduce per bucket and step: the replica hop waits for the last
// microbatch.
[[nodiscard]] Claim collectives_claim(const TrainingResult& mesh);
// All runs end with the same bits, although they use two transports and two bucket counts.
[[nodiscard]] Claim same_bits_claim(const std::vector<TrainingResult>& runs);

// The mesh's gradients, from snapshots in `mesh`, equal those recomputed in float64.
[[nodiscard]] Claim gradient_claim(const DemoOptions& options, const MeshRun& mesh);
// Those of the training in the wrong order do not, and hsdp_check says which.
[[nodiscard]] Claim wrong_order_claim(const DemoOptions& options, const MeshRun& wrong);
[[nodiscard]] std::filesystem::path report_path(const DemoOptions& options,
                                                const std::string& name);

// A rank is killed in the middle of a training; the others report it promptly.
[[nodiscard]] Claim kill_claim(const DemoOptions& options);

}  // namespace examples
