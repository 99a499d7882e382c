#include "device_world.h"

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <utility>

#include "hsdp/error.h"
#include "tests/support/engine_around.h"

namespace hsdp::stand_in {
namespace {

class DeviceEngine : public test::EngineAround {
 public:
  DeviceEngine(std::shared_ptr<Communicator::Engine> host, Device device)
      : EngineAround(std::move(host)),
        device_(device),
        group_id_(inner()->group_id() + "/device") {}

  [[nodiscard]] std::string_view name() const override { return "stand-in"; }
  [[nodiscard]] const std::string& group_id() const override { return group_id_; }

  void reduce_scatter(const ReduceScatter& args, Stream& stream) override {
    ReduceScatter same = args;
    same.in.device = same.out.device = {};
    enqueue_call(stream, [host = inner(), same](Stream& now) { host->reduce_scatter(same, now); });
  }
  void all_reduce(const AllReduce& args, Stream& stream) override {
    AllReduce same = args;
    same.data.device = {};
    enqueue_call(stream, [host = inner(), same](Stream& now) { host->all_reduce(same, now); });
  }
  void all_gather(ConstTensorView in, TensorView out, const RowCut& cut, int bucket,
                  Stream& stream) override {
    in.device = out.device = {};
    enqueue_call(stream, [host = inner(), in, out, cut, bucket](Stream& now) {
      host->all_gather(in, out, cut, bucket, now);
    });
  }
  void all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, int bucket,
                  Stream& stream) override {
    in.device = out.device = {};
    enqueue_call(stream, [host = inner(), in, out, cut, bucket](Stream& now) {
      host->all_to_all(in, out, cut, bucket, now);
    });
  }
  void broadcast(TensorView data, int root, Stream& stream) override {
    data.device = {};
    enqueue_call(stream,
                 [host = inner(), data, root](Stream& now) { host->broadcast(data, root, now); });
  }
  void barrier(Stream& stream) override {
    enqueue_call(stream, [host = inner()](Stream& now) { host->barrier(now); });
  }
  [[nodiscard]] std::shared_ptr<Communicator::Engine> split(int color, int key) override {
    std::shared_ptr<Communicator::Engine> part = inner()->split(color, key);
    if (part == nullptr) return nullptr;
    return std::make_shared<DeviceEngine>(std::move(part), device_);
  }
  [[nodiscard]] SharedMemory allocate(std::int64_t count, Dtype dtype) override {
    const SharedMemory memory = inner()->allocate(count, dtype);
    TensorView view = memory.view();
    view.device = device_;
    return SharedMemory(memory.owner(), view);
  }

 private:
  static void enqueue_call(Stream& stream, const std::function<void(Stream&)>& call) {
    enqueue("collective", static_cast<cudaStream_t>(stream.native_handle()), [call] {
      Stream now = Stream::inline_host();
      try {
        call(now);
      } catch (const Error&) {  // the control connection knows it: every rank finds out there
      }
    });
  }

  Device device_;
  std::string group_id_;
};

}  // namespace

Communicator on_device(const Communicator& host, Device device) {
  return Communicator(std::make_shared<DeviceEngine>(host.engine(), device));
}

}  // namespace hsdp::stand_in
