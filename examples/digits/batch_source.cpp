#include "examples/digits/batch_source.h"

#include <string>

#include "hsdp/error.h"

namespace examples {

BatchSource::BatchSource(DigitSet images, const TrainingOptions& options, int rank_count)
    : images_(std::move(images)),
      order_(images_.size(), options.seed),
      batch_size_(options.batch_size),
      rank_count_(static_cast<std::size_t>(rank_count)),
      part_size_(0) {
  const std::size_t part_count = options.microbatch_count * rank_count_;
  if (part_count == 0 || batch_size_ == 0 || batch_size_ % part_count != 0) {
    throw hsdp::UsageError("batch: expected a multiple of " + std::to_string(part_count) +
                           " images (microbatches times ranks), got " +
                           std::to_string(batch_size_) + ": set --batch");
  }
  part_size_ = batch_size_ / part_count;
}

DigitSet BatchSource::microbatch(std::size_t step, std::size_t microbatch, int rank) {
  const std::size_t part = microbatch * rank_count_ + static_cast<std::size_t>(rank);
  return images_.pick(order_.indices(step * batch_size_ + part * part_size_, part_size_));
}

DigitSet BatchSource::whole_batch(std::size_t step) {
  return images_.pick(order_.indices(step * batch_size_, batch_size_));
}

}  // namespace examples
