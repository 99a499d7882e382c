// One rank of a step whose gradients and results lie on its mesh's device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device_world.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/in_flight.h"
#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp::test {

constexpr Device kGpu{DeviceType::kCuda, 0};
constexpr std::int64_t kSmallBuckets = 4096;

inline std::vector<ParameterSpec> parameters(Dtype dtype) {
  return {{.name = "matrix", .shape = {37, 29}, .dtype = dtype},
          {.name = "odd", .shape = {7}, .dtype = dtype},
          {.name = "large", .shape = {5003}, .dtype = dtype},
          {.name = "empty", .shape = {0}, .dtype = dtype},
          {.name = "scalar", .shape = {}, .dtype = dtype}};
}

// Runs the body on every rank of a mesh on that GPU, with the host's collectives.
inline void run_gpu_mesh(MeshShape shape, const MeshBody& body, Device device = kGpu) {
  run_ranks(shape.size(), [&](Communicator& world) {
    const Mesh mesh(stand_in::on_device(world, device),
                    {.replicate = shape.replicate, .shard = shape.shard, .device = device});
    body(mesh);
  });
}

// What the body returns on each of those ranks.
inline std::vector<RankResult> gpu_results(MeshShape shape,
                                           const std::function<RankResult(const Mesh&)>& body) {
  std::vector<RankResult> results(static_cast<std::size_t>(shape.size()));
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    results[static_cast<std::size_t>(mesh.rank())] = body(mesh);
  });
  return results;
}

// Memory of gradients. A stream writes it, and it is filled with NaNs as soon as the Reducer
// releases it: at once, or in stream order, as by an allocator that gives it to another owner.
class GradientMemory : public std::enable_shared_from_this<GradientMemory> {
 public:
  GradientMemory(Stream stream, KeptUntil kept_until)
      : stream_(std::move(stream)), kept_until_(kept_until) {}
  ~GradientMemory() {
    quietly([this] { stream_.synchronize(); });
  }
  GradientMemory(const GradientMemory&) = delete;
  GradientMemory& operator=(const GradientMemory&) = delete;

  // Holds those bytes once the stream has come to it.
  [[nodiscard]] std::shared_ptr<const void> write(const void* data, std::size_t size) {
    const auto block = std::make_shared<Block>();
    const auto* const bytes = static_cast<const std::byte*>(data);
    block->source.assign(bytes, bytes + size);
    block->memory.assign(size, std::byte{0xff});
    block->other = block->memory;
    if (kept_until_ == KeptUntil::kOrdered) {
      const std::lock_guard lock(mutex_);
      blocks_.push_back(block);
    }
    copy_bytes(block->memory.data(), block->source.data(), size, stream_);
    block->written = stream_.record();
    if (kept_until_ == KeptUntil::kRead) in_flight_.hold(block->written, block);
    return {block->memory.data(),
            [self = shared_from_this(), block](const void* /*unused*/) { self->reuse(block); }};
  }

 private:
  struct Block {
    std::vector<std::byte> source;
    std::vector<std::byte> memory;
    std::vector<std::byte> other;
    Event written;
  };

  void reuse(const std::shared_ptr<Block>& block) {
    const bool is_read = kept_until_ == KeptUntil::kRead;
    quietly([&] {
      if (is_read && block->written.complete()) {
        std::ranges::copy(block->other, block->memory.begin());
        return;
      }
      Stream stream = stream_;  // a dropped step's may not have one yet
      stream.run([&block, &stream] {
        copy_bytes(block->memory.data(), block->other.data(), block->other.size(), stream);
      });
      if (is_read) in_flight_.hold(stream.record(), block);
    });
  }

  // Streams throw once nothing runs any more.
  template <typename Call>
  static void quietly(const Call& call) {
    try {
      call();
    } catch (const Error&) {
    }
  }

  Stream stream_;
  KeptUntil kept_until_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Block>> blocks_;  // until the stream is done
  InFlight in_flight_;                          // other memory that it still writes
};

// Registers a step's parameters, hands over its gradients, which are written on the caller's
// stream, and reads its result there.
class GpuRank {
 public:
  GpuRank(Reducer& reducer, const StepCase& step, const Mesh& mesh,
          KeptUntil kept_until = KeptUntil::kRead)
      : reducer_(reducer),
        step_(step),
        rank_(static_cast<std::size_t>(mesh.rank())),
        device_(mesh.device()),
        kept_until_(kept_until),
        stream_(device_.type == DeviceType::kHost ? Stream::inline_host()
                                                  : Stream::create(device_, "caller")),
        memory_(std::make_shared<GradientMemory>(stream_, kept_until)) {
    register_all(reducer_, step_);
    reducer_.set_stream(stream_);
  }
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;

  void begin(std::size_t m) { reducer_.begin_microbatch({.sync = step_.schedule[m]}); }
  // Null if the step has no gradient there.
  void hand_over(std::size_t p, std::size_t m) {
    const auto& values = step_.gradients[p][m][rank_];
    if (!values) return;
    const ParameterSpec& spec = step_.parameters[p];
    const StoredGradient source(
        *values, spec.shape, spec.dtype,
        spec.shape.size() == 2 ? std::vector<int>{1, 0} : std::vector<int>{});
    StridedView view = source.view();
    const auto memory =
        memory_->write(view.data, static_cast<std::size_t>(view.count()) * size_bytes(view.dtype));
    view.data = memory.get();
    view.device = device_;
    if (kept_until_ == KeptUntil::kRead) return reducer_.gradient_ready(spec.name, view, memory);
    reducer_.gradient_ready(static_cast<int>(p), view, memory, stream_, kept_until_);
  }
  void hand_over_all(std::size_t m) {
    for (std::size_t p = 0; p < step_.parameters.size(); ++p) hand_over(p, m);
  }
  void run_microbatch(std::size_t m, const MicrobatchOptions& options) {
    Microbatch open(reducer_, options);
    hand_over_all(m);
    open.end();
  }
  void run_microbatch(std::size_t m) { run_microbatch(m, {.sync = step_.schedule[m]}); }
  void run() {
    for (std::size_t m = 0; m < step_.schedule.size(); ++m) run_microbatch(m);
    if (step_.finish) reducer_.finish();
  }
  // The result is valid once the stream has come to it.
  void enqueue_read(RankResult& result) {
    result = {};
    for (const ParameterSpec& spec : step_.parameters) {
      const TensorView shard = reducer_.shard(spec.name);
      EXPECT_EQ(shard.device, device_);
      result.slices.push_back(reducer_.slice(spec.name));
      result.shards.emplace_back(static_cast<std::size_t>(shard.count));
      copy_bytes(result.shards.back().data(), shard.data, shard.size_in_bytes(), stream_);
    }
  }
  RankResult read() {
    RankResult result;
    try {
      enqueue_read(result);
    } catch (...) {
      finish();  // of earlier copies
      throw;
    }
    stream_.synchronize();
    return result;
  }
  RankResult run_step() {
    run();
    return read();
  }
  // Waits for the caller's stream, even if its work fails.
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
  std::shared_ptr<GradientMemory> memory_;
};

}  // namespace hsdp::test
