// Cuts a step's batch into microbatches for ranks. The images of a step do not depend on the number
// of ranks.
#pragma once

#include <cstddef>
#include <utility>

#include "examples/digits/digit_set.h"
#include "examples/digits/training_options.h"

namespace examples {

class BatchSource {
 public:
  // Throws UsageError if microbatches and ranks do not divide the batch evenly.
  BatchSource(DigitSet images, const TrainingOptions& options, int rank_count);

  // Steps and microbatches count from 0.
  [[nodiscard]] DigitSet microbatch(std::size_t step, std::size_t microbatch, int rank);
  [[nodiscard]] DigitSet whole_batch(std::size_t step);

 private:
  DigitSet images_;
  BatchOrder order_;
  std::size_t batch_size_;
  std::size_t rank_count_;
  std::size_t part_size_;  // images of one rank in one microbatch
};

}  // namespace examples
