#include "device_world.h"

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <utility>

#include "hsdp/error.h"
#include "tests/support/engine_around.h"

namespace hsdp::stand_in {
namespace {

// Runs the inner engine's call on the stream that the outer engine is given.
using Run = void (*)(Stream& stream, const std::function<void(Stream&)>& call);

class MovedEngine : public test::EngineAround {
 public:
  MovedEngine(std::shared_ptr<Communicator::Engine> engine, Device inside, Device outside, Run run)
      : EngineAround(std::move(engine)),
        inside_(inside),
        outside_(outside),
        run_(run),
        group_id_(inner()->group_id() + "/moved") {}

  [[nodiscard]] std::string_view name() const override { return "stand-in"; }
  [[nodiscard]] const std::string& group_id() const override { return group_id_; }

  void reduce_scatter(const ReduceScatter& args, Stream& stream) override {
    ReduceScatter same = args;
    same.in.device = same.out.device = inside_;
    run_(stream, [engine = inner(), same](Stream& now) { engine->reduce_scatter(same, now); });
  }
  void all_reduce(const AllReduce& args, Stream& stream) override {
    AllReduce same = args;
    same.data.device = inside_;
    run_(stream, [engine = inner(), same](Stream& now) { engine->all_reduce(same, now); });
  }
  void all_gather(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                  Stream& stream) override {
    in.device = out.device = inside_;
    run_(stream, [engine = inner(), in, out, cut, label](Stream& now) {
      engine->all_gather(in, out, cut, label, now);
    });
  }
  void all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, CallLabel label,
                  Stream& stream) override {
    in.device = out.device = inside_;
    run_(stream, [engine = inner(), in, out, cut, label](Stream& now) {
      engine->all_to_all(in, out, cut, label, now);
    });
  }
  void broadcast(TensorView data, int root, Stream& stream) override {
    data.device = inside_;
    run_(stream,
         [engine = inner(), data, root](Stream& now) { engine->broadcast(data, root, now); });
  }
  void barrier(Stream& stream) override {
    run_(stream, [engine = inner()](Stream& now) { engine->barrier(now); });
  }
  [[nodiscard]] std::shared_ptr<Communicator::Engine> split(int color, int key) override {
    std::shared_ptr<Communicator::Engine> part = inner()->split(color, key);
    if (part == nullptr) return nullptr;
    return std::make_shared<MovedEngine>(std::move(part), inside_, outside_, run_);
  }
  [[nodiscard]] SharedMemory allocate(std::int64_t count, Dtype dtype) override {
    const SharedMemory memory = inner()->allocate(count, dtype);
    TensorView view = memory.view();
    view.device = outside_;
    return SharedMemory(memory.owner(), view);
  }

 private:
  Device inside_;
  Device outside_;
  Run run_;
  std::string group_id_;
};

void enqueue_call(Stream& stream, const std::function<void(Stream&)>& call) {
  enqueue("collective", static_cast<cudaStream_t>(stream.native_handle()), [call] {
    Stream now = Stream::inline_host();
    try {
      call(now);
    } catch (const Error&) {  // the control connection knows of it: every rank learns of it there
    }
  });
}

}  // namespace

Communicator on_device(const Communicator& host, Device device) {
  return Communicator(std::make_shared<MovedEngine>(host.engine(), Device{}, device, enqueue_call));
}

Communicator with_host_views(const Communicator& nccl, Device device) {
  const auto run = [](Stream& stream, const std::function<void(Stream&)>& call) { call(stream); };
  return Communicator(std::make_shared<MovedEngine>(nccl.engine(), device, Device{}, run));
}

}  // namespace hsdp::stand_in
