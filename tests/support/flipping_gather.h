// An engine that flips one bit of what an all-gather brings on one rank: what a fault of a link
// would do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "hsdp/comm/communicator.h"
#include "tests/support/engine_around.h"

namespace hsdp::test {

class FlippingGather final : public EngineAround {
 public:
  // `left`: all-gathers until the one in which the first bit of another rank is flipped, in all
  // groups; -1: none is.
  FlippingGather(std::shared_ptr<Communicator::Engine> engine, std::shared_ptr<int> left)
      : EngineAround(std::move(engine)),
        left_(std::move(left)),
        id_(inner()->group_id() + " with a fault") {}

  [[nodiscard]] const std::string& group_id() const override { return id_; }

  void reduce_scatter(const ReduceScatter& args, Stream& stream) override {
    inner()->reduce_scatter(args, stream);
  }
  void all_reduce(const AllReduce& args, Stream& stream) override {
    inner()->all_reduce(args, stream);
  }
  void all_gather(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                  Stream& stream) override {
    inner()->all_gather(in, out, cut, label, stream);
    if (*left_ < 0 || (*left_)-- > 0) return;
    const auto peer =
        static_cast<int>((static_cast<std::size_t>(rank()) + 1) % world_ranks().size());
    const auto place = cut.begin(peer) * static_cast<std::int64_t>(size_bytes(out.dtype));
    auto* const byte = static_cast<unsigned char*>(out.data) + place;
    *byte = static_cast<unsigned char>(*byte ^ 1U);
  }
  void all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                  Stream& stream) override {
    inner()->all_to_all(in, out, cut, label, stream);
  }
  void broadcast(TensorView data, int root, Stream& stream) override {
    inner()->broadcast(data, root, stream);
  }
  void barrier(Stream& stream) override { inner()->barrier(stream); }
  [[nodiscard]] std::shared_ptr<Communicator::Engine> split(int color, int key) override {
    std::shared_ptr<Communicator::Engine> part = inner()->split(color, key);
    return part ? std::make_shared<FlippingGather>(std::move(part), left_) : part;
  }
  [[nodiscard]] SharedMemory allocate(std::int64_t count, Dtype dtype) override {
    return inner()->allocate(count, dtype);
  }
  void wait(const Event& event) override { inner()->wait(event); }

 private:
  std::shared_ptr<int> left_;
  std::string id_;
};

}  // namespace hsdp::test
