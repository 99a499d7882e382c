#include <string>

#include "hsdp/device/cuda_device.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

[[noreturn]] void refuse(Device device) {
  throw UsageError({.where = "device: " + to_string(device),
                    .expected = "a build with CUDA",
                    .got = "one without",
                    .remedy = "configure with -DHSDP_CUDA=ON, or use the cpu"});
}

}  // namespace

std::shared_ptr<Stream::Queue> make_cuda_queue(Device device, const std::string& /*name*/) {
  refuse(device);
}

std::shared_ptr<Stream::Queue> borrow_cuda_queue(Device device, void* /*native_handle*/) {
  refuse(device);
}

std::shared_ptr<std::byte> allocate_cuda(Device device, std::size_t /*size*/) { refuse(device); }

void free_cuda_after(Device device, const Event& /*event*/) { refuse(device); }

std::shared_ptr<std::byte> allocate_cuda_pinned(Device device, std::size_t /*size*/) {
  refuse(device);
}

std::shared_ptr<std::byte> allocate_cuda_scratch(std::size_t /*size*/, const Stream& stream) {
  refuse(stream.device());
}

std::shared_ptr<void> reserve_cuda_scratch(Device device, std::size_t /*size*/) { refuse(device); }

std::shared_ptr<std::atomic<std::uint32_t>> make_cuda_flag(Device device) { refuse(device); }

void copy_on_cuda(void* /*to*/, const void* /*from*/, std::size_t /*size*/, const Stream& stream) {
  refuse(stream.device());
}

}  // namespace hsdp
