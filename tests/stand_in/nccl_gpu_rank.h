// One rank of a step on the NCCL engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "hsdp/device/copy.h"
#include "nccl_ranks.h"
#include "tests/support/reducer_step.h"

namespace hsdp::test {

// Gradients' memory that a stream writes, and fills with NaNs in its order as soon as the Reducer
// lets go of it, as an allocator that gives it to somebody else.
class OrderedMemory : public std::enable_shared_from_this<OrderedMemory> {
 public:
  explicit OrderedMemory(Stream stream) : stream_(std::move(stream)) {}
  ~OrderedMemory() {
    try {
      stream_.synchronize();
    } catch (const Error&) {  // it throws when nothing runs any more
    }
  }
  OrderedMemory(const OrderedMemory&) = delete;
  OrderedMemory& operator=(const OrderedMemory&) = delete;

  // Holds those bytes when the stream has come so far. Not for none.
  [[nodiscard]] std::shared_ptr<const void> write(const void* data, std::size_t size) {
    const auto block = std::make_shared<Block>();
    const auto* const bytes = static_cast<const std::byte*>(data);
    block->source.assign(bytes, bytes + size);
    block->memory.assign(size, std::byte{0xff});
    block->other = block->memory;
    {
      const std::lock_guard lock(mutex_);
      blocks_.push_back(block);
    }
    copy_bytes(block->memory.data(), block->source.data(), size, stream_);
    return {block->memory.data(),
            [self = shared_from_this(), block](const void* /*unused*/) { self->reuse(*block); }};
  }

 private:
  struct Block {
    std::vector<std::byte> source;
    std::vector<std::byte> memory;
    std::vector<std::byte> other;
  };

  void reuse(Block& block) {
    Stream stream = stream_;
    stream.run([&block, &stream] {
      copy_bytes(block.memory.data(), block.other.data(), block.other.size(), stream);
    });
  }

  Stream stream_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Block>> blocks_;  // until the stream is done
};

// Hands a step's gradients over on a GPU and reads its result. With KeptUntil::kOrdered they come
// into being on the caller's stream, and their memory is another's behind the Reducer's reads.
class GpuRank {
 public:
  GpuRank(Reducer& reducer, const StepCase& step, const Mesh& mesh,
          KeptUntil kept_until = KeptUntil::kRead)
      : reducer_(reducer),
        step_(step),
        rank_(static_cast<std::size_t>(mesh.rank())),
        device_(mesh.device()),
        kept_until_(kept_until),
        stream_(Stream::create(device_, "caller")),
        ordered_(std::make_shared<OrderedMemory>(stream_)) {
    register_all(reducer_, step_);
    reducer_.set_stream(stream_);
  }
  ~GpuRank() {  // before the gradients go
    try {
      reducer_.packed().wait();
    } catch (const Error&) {  // nobody knows when
      static auto* const kept = new std::vector<std::vector<StoredGradient>>;
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      kept->push_back(std::move(stored_));
    }
  }
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;

  void begin(std::size_t m) { reducer_.begin_microbatch({.sync = step_.schedule[m]}); }
  // Nothing where the step has a hole.
  void hand_over(std::size_t p, std::size_t m) {
    const auto& values = step_.gradients[p][m][rank_];
    if (!values) return;
    const ParameterSpec& spec = step_.parameters[p];
    StoredGradient made(*values, spec.shape, spec.dtype);
    StridedView view = made.view();
    view.device = device_;
    const std::size_t size = static_cast<std::size_t>(view.count()) * size_bytes(view.dtype);
    if (kept_until_ == KeptUntil::kRead || size == 0) {
      stored_.push_back(std::move(made));
      reducer_.gradient_ready(spec.name, view, {}, Event());
      return;
    }
    const std::shared_ptr<const void> memory = ordered_->write(view.data, size);
    view.data = memory.get();
    reducer_.gradient_ready(static_cast<int>(p), view, memory, stream_, kept_until_);
  }
  void run_microbatch(std::size_t m) {
    begin(m);
    for (std::size_t p = 0; p < step_.parameters.size(); ++p) hand_over(p, m);
    reducer_.end_microbatch();
  }
  RankResult run_step() {
    for (std::size_t m = 0; m < step_.schedule.size(); ++m) run_microbatch(m);
    if (step_.finish) reducer_.finish();
    return read();
  }
  RankResult read() {
    RankResult result;
    try {
      for (const ParameterSpec& spec : step_.parameters) {
        const TensorView shard = reducer_.shard(spec.name);
        result.slices.push_back(reducer_.slice(spec.name));
        result.shards.emplace_back(static_cast<std::size_t>(shard.count));
        copy_bytes(result.shards.back().data(), shard.data, shard.size_in_bytes(), stream_);
      }
    } catch (...) {
      finish();  // the copies before
      throw;
    }
    stream_.synchronize();
    return result;
  }
  // Waits for the caller's stream, whatever becomes of its work.
  void finish() noexcept {
    try {
      stream_.synchronize();
    } catch (const std::exception&) {
    }
  }
  [[nodiscard]] Stream& stream() { return stream_; }

 private:
  Reducer& reducer_;
  const StepCase& step_;
  std::size_t rank_;
  Device device_;
  KeptUntil kept_until_;
  Stream stream_;
  std::shared_ptr<OrderedMemory> ordered_;
  std::vector<StoredGradient> stored_;
};

inline std::vector<ParameterSpec> parameters(Dtype dtype) {
  return {{.name = "matrix", .shape = {37, 29}, .dtype = dtype},
          {.name = "odd", .shape = {7}, .dtype = dtype},
          {.name = "large", .shape = {5003}, .dtype = dtype},
          {.name = "empty", .shape = {0}, .dtype = dtype},
          {.name = "scalar", .shape = {}, .dtype = dtype}};
}

constexpr std::int64_t kSmallBuckets = 4096;

}  // namespace hsdp::test
