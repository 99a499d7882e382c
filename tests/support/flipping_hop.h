// The plain hop, with one bit of a bucket flipped on one rank, as a memory fault would do.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "hsdp/device/copy.h"
#include "hsdp/replica_hop.h"

namespace hsdp::test {

class FlippingHop final : public ReplicaHop {
 public:
  enum class When : std::uint8_t { kBeforeSum, kAfterSum, kNever };
  struct Flip {
    When when = When::kNever;
    std::int64_t step = 0;
    int bucket = 0;
    std::int64_t bit = 0;  // of the bucket's memory
  };
  explicit FlippingHop(Flip flip) : flip_(flip) {}

  [[nodiscard]] std::string describe() const override { return "flipping"; }
  [[nodiscard]] bool needs_gather_group() const override { return false; }
  void prepare(const HopPlan& plan) override { plain_.prepare(plan); }
  void bind(Communicator scatter, Communicator gather) override {
    plain_.bind(std::move(scatter), std::move(gather));
  }
  Event reduce(const HopBucket& bucket, Stream& stream) override {
    if (is_now(When::kBeforeSum, bucket)) flip(bucket.data, stream);
    const Event reduced = plain_.reduce(bucket, stream);
    if (!is_now(When::kAfterSum, bucket)) return reduced;
    stream.wait(reduced);
    flip(bucket.data, stream);
    return stream.record();
  }
  void end_step(const StepEnd& end) override { next_step_ = end.step + 1; }

 private:
  [[nodiscard]] bool is_now(When when, const HopBucket& bucket) const {
    return flip_.when == when && next_step_ == flip_.step && bucket.bucket == flip_.bucket;
  }
  void flip(TensorView data, Stream& stream) const {
    auto* const byte = static_cast<unsigned char*>(data.data) + flip_.bit / 8;
    unsigned char value = 0;
    copy_bytes(&value, byte, 1, stream);
    stream.synchronize();
    value = static_cast<unsigned char>(value ^ (1U << flip_.bit % 8));
    copy_bytes(byte, &value, 1, stream);
    stream.synchronize();
  }

  Flip flip_;
  PlainHop plain_;
  std::int64_t next_step_ = 0;
};

}  // namespace hsdp::test
