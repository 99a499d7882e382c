#include "hsdp/comm/nccl/nccl_memory.h"

#include <memory>
#include <string>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/cuda_call.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

// A block of NCCL's memory, registered while its communicator lives.
class RegisteredBlock {
 public:
  RegisteredBlock(const NcclGroup& group, std::size_t bytes)
      : world_(group.world()), link_(group.link()) {
    const OnCudaDevice current(world_->device);
    memory_ = world_->library->allocate(bytes);
    clear_cuda_memory(world_->device, memory_, bytes);
    if (link_ != nullptr) enrolled_ = link_->enroll(memory_, bytes);
  }
  ~RegisteredBlock() {
    try {
      const OnCudaDevice current(world_->device);
      // Until everything is aborted a kernel may write there: it is left to it.
      const bool is_used =
          world_->control->failed() && link_ != nullptr && !world_->watch->aborted();
      if (link_ != nullptr) link_->withdraw(enrolled_);
      link_.reset();
      if (!is_used) world_->library->free(memory_);
    } catch (const Error&) {  // the device is gone, and the memory with it
    }
  }
  RegisteredBlock(const RegisteredBlock&) = delete;
  RegisteredBlock& operator=(const RegisteredBlock&) = delete;
  [[nodiscard]] void* data() const { return memory_; }

 private:
  std::shared_ptr<NcclWorld> world_;
  std::shared_ptr<NcclLink> link_;
  void* memory_ = nullptr;
  void* enrolled_ = nullptr;
};

SharedMemory allocate_block(const NcclGroup& group, std::int64_t count, Dtype dtype) {
  const Device device = group.world()->device;
  const std::size_t bytes = static_cast<std::size_t>(count) * size_bytes(dtype);
  if (group.link() != nullptr && group.library().can_register() && bytes > 0) {
    auto block = std::make_shared<RegisteredBlock>(group, bytes);
    void* const data = block->data();
    return SharedMemory(std::move(block), {data, count, dtype, device});
  }
  auto buffer = std::make_shared<Buffer>(device, bytes);
  std::byte* const data = buffer->data();
  return SharedMemory(std::move(buffer), {data, count, dtype, device});
}

}  // namespace

SharedMemory allocate_registered(NcclGroup& group, std::int64_t count, Dtype dtype) {
  group.agree({.operation = Operation::kAllocate, .dtype = dtype, .wire = dtype});
  SharedMemory memory;
  std::string reason;
  try {
    memory = allocate_block(group, count, dtype);
  } catch (const std::exception& error) {
    reason = error.what();
  }
  throw_agreed(group.exchange("memory", reason), group.members(), group.control());
  return memory;
}

}  // namespace hsdp::comm
