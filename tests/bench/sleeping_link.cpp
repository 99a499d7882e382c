#include "sleeping_link.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "tests/support/engine_around.h"

namespace hsdp::bench {
namespace {

// A rank's link: carry() returns when the link has sent the bytes.
class Link {
 public:
  explicit Link(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  void carry(double bytes) {
    using Clock = std::chrono::steady_clock;
    const std::chrono::duration<double> time(bytes / bytes_per_s_);
    std::unique_lock lock(mutex_);
    free_at_ = std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(time);
    const Clock::time_point done = free_at_;
    lock.unlock();
    std::this_thread::sleep_until(done);
  }

 private:
  const double bytes_per_s_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point free_at_{};
};

class SleepingEngine : public test::EngineAround {
 public:
  SleepingEngine(std::shared_ptr<Communicator::Engine> engine, std::shared_ptr<Link> link)
      : EngineAround(std::move(engine)),
        link_(std::move(link)),
        id_(inner()->group_id() + " behind a link") {}

  [[nodiscard]] const std::string& group_id() const override { return id_; }

  void reduce_scatter(const ReduceScatter& args, Stream& stream) override {
    inner()->reduce_scatter(args, stream);
    carry(args.in.size_in_bytes(), stream);
  }
  void all_reduce(const AllReduce& args, Stream& stream) override {
    inner()->all_reduce(args, stream);
    const std::size_t element = size_bytes(args.wire.value_or(args.data.dtype));
    carry(2 * static_cast<std::size_t>(args.data.count) * element, stream);
  }
  void all_gather(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                  Stream& stream) override {
    inner()->all_gather(in, out, cut, label, stream);
    carry(out.size_in_bytes(), stream);
  }
  void all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                  Stream& stream) override {
    inner()->all_to_all(in, out, cut, label, stream);
    carry(in.size_in_bytes(), stream);
  }
  void broadcast(TensorView data, int root, Stream& stream) override {
    inner()->broadcast(data, root, stream);
    carry(data.size_in_bytes(), stream);
  }
  void barrier(Stream& stream) override { inner()->barrier(stream); }
  [[nodiscard]] std::shared_ptr<Engine> split(int color, int key) override {
    std::shared_ptr<Engine> part = inner()->split(color, key);
    return part ? std::make_shared<SleepingEngine>(std::move(part), link_) : part;
  }
  [[nodiscard]] SharedMemory allocate(std::int64_t count, Dtype dtype) override {
    return inner()->allocate(count, dtype);
  }
  void wait(const Event& event) override { inner()->wait(event); }

 private:
  // A rank does not send its own row of a message.
  void carry(std::size_t message_bytes, Stream& stream) {
    const auto size = static_cast<double>(world_ranks().size());
    const double bytes = static_cast<double>(message_bytes) * (size - 1) / size;
    stream.run([link = link_, bytes] { link->carry(bytes); });
  }

  std::shared_ptr<Link> link_;
  std::string id_;
};

}  // namespace

Communicator behind_sleeping_link(const Communicator& world, double bytes_per_s) {
  return Communicator(
      std::make_shared<SleepingEngine>(world.engine(), std::make_shared<Link>(bytes_per_s)));
}

}  // namespace hsdp::bench
