// One rank of a mesh on the stand-in's GPU, for tests of the Reducer there.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "device_world.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/in_flight.h"
#include "tests/support/reducer_step.h"

namespace hsdp::stand_in {

constexpr Device kGpu{DeviceType::kCuda, 0};
using Bytes = std::vector<std::byte>;

// One rank's view of the GPU: gradients come into being on its stream, and are overwritten there as
// soon as the Reducer has read them.
class Rank {
 public:
  Rank(Reducer& reducer, const test::StepCase& step, int rank)
      : reducer_(reducer), step_(step), rank_(rank) {
    reducer_.set_stream(stream_);
  }
  ~Rank() { stream_.synchronize(); }  // before what is in flight goes
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void run_microbatch(std::size_t m, const MicrobatchOptions& options) {
    Microbatch open(reducer_, options);
    std::vector<std::shared_ptr<Bytes>> made;
    for (std::size_t p = 0; p < step_.parameters.size(); ++p) made.push_back(hand_over(p, m));
    open.end();
    stream_.wait(reducer_.packed());
    for (const auto& memory : made) write(Bytes(memory->size(), std::byte{0xff}), memory);
  }

  void run_steps() {
    for (std::size_t m = 0; m < step_.schedule.size(); ++m) {
      run_microbatch(m, {.sync = step_.schedule[m]});
    }
    if (step_.finish) reducer_.finish();
  }

  // Enqueues copies of the result; they are there after synchronize().
  void read(test::RankResult& result) {
    for (const ParameterSpec& spec : step_.parameters) {
      const TensorView shard = reducer_.shard(spec.name);
      EXPECT_EQ(shard.device, kGpu);
      result.slices.push_back(reducer_.slice(spec.name));
      result.shards.emplace_back(static_cast<std::size_t>(shard.count));
      copy_bytes(result.shards.back().data(), shard.data, shard.size_in_bytes(), stream_);
    }
  }

  // The gradient of parameter p in microbatch m, which is not there yet when it is handed over.
  std::shared_ptr<Bytes> hand_over(std::size_t p, std::size_t m) {
    const ParameterSpec& spec = step_.parameters[p];
    const test::StoredGradient source(
        *step_.gradients[p][m][static_cast<std::size_t>(rank_)], spec.shape, spec.dtype,
        spec.shape.size() == 2 ? std::vector<int>{1, 0} : std::vector<int>{});
    StridedView view = source.view();
    const auto* const begin = static_cast<const std::byte*>(view.data);
    const Bytes values(begin,
                       begin + view.count() * static_cast<std::int64_t>(size_bytes(view.dtype)));
    auto memory = std::make_shared<Bytes>(values.size(), std::byte{0xff});
    write(values, memory);
    view.data = memory->empty() ? nullptr : memory->data();
    view.device = kGpu;
    reducer_.gradient_ready(spec.name, view, memory);
    return memory;
  }

  // A microbatch of gradients that nobody has to wait for.
  std::vector<test::StoredGradient> hand_over_at_once(std::size_t m) {
    std::vector<test::StoredGradient> stored;
    Microbatch open(reducer_, {.last = true});
    for (std::size_t p = 0; p < step_.parameters.size(); ++p) {
      const ParameterSpec& spec = step_.parameters[p];
      stored.emplace_back(*step_.gradients[p][m][static_cast<std::size_t>(rank_)], spec.shape,
                          spec.dtype);
      StridedView view = stored.back().view();
      view.device = kGpu;
      reducer_.gradient_ready(spec.name, view, {}, Event());
    }
    open.end();
    return stored;
  }

  [[nodiscard]] Stream& stream() { return stream_; }

 private:
  void write(const Bytes& values, const std::shared_ptr<Bytes>& memory) {
    const auto source = std::make_shared<Bytes>(values);
    copy_bytes(memory->data(), source->data(), source->size(), stream_);
    in_flight_.hold(stream_.record(), source);
    in_flight_.hold(stream_.record(), memory);
  }

  Reducer& reducer_;
  const test::StepCase& step_;
  int rank_;
  InFlight in_flight_;
  Stream stream_ = Stream::create(kGpu, "caller");
};

// The body on every rank of a mesh on the GPU.
inline void run_gpu_mesh(test::MeshShape shape, const test::MeshBody& body) {
  test::run_ranks(shape.size(), [&](Communicator& world) {
    const Mesh mesh(on_device(world, kGpu),
                    {.replicate = shape.replicate, .shard = shape.shard, .device = kGpu});
    body(mesh);
  });
}

inline std::vector<ParameterSpec> parameters(Dtype dtype) {
  return {{.name = "matrix", .shape = {37, 29}, .dtype = dtype},
          {.name = "odd", .shape = {7}, .dtype = dtype},
          {.name = "large", .shape = {5003}, .dtype = dtype},
          {.name = "empty", .shape = {0}, .dtype = dtype},
          {.name = "scalar", .shape = {}, .dtype = dtype}};
}

}  // namespace hsdp::stand_in
