#include "hsdp/device/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "hsdp/device/cuda_device.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20U;

[[noreturn]] void no_memory(std::size_t size, const char* why) {
  throw Error("buffer: cannot allocate: expected " + std::to_string(size) +
              " bytes of host memory, got " + why + "; free memory or raise the process's limit");
}

std::size_t round_up(std::size_t size, std::size_t unit) { return (size + unit - 1) / unit * unit; }

// Faults every page in now. Only MADV_POPULATE_WRITE reports a lack of memory.
void touch(std::byte* data, std::size_t length, std::size_t page_bytes) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, length, MADV_POPULATE_WRITE) == 0) return;
  if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) {
    const int error = errno;
    munmap(data, length);
    no_memory(length, std::strerror(error));
  }
#endif
  for (std::size_t offset = 0; offset < length; offset += page_bytes) {
    *const_cast<volatile std::byte*>(data + offset) = std::byte{0};
  }
}

std::shared_ptr<std::byte> allocate_host(std::size_t size) {
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (size > std::numeric_limits<std::size_t>::max() / 2) no_memory(size, "an impossible size");
  const bool huge = size >= kHugePageBytes;
  const std::size_t length = round_up(size, page_bytes);
  // Map one huge page more than needed, then trim both ends to its alignment.
  const std::size_t slack = huge ? kHugePageBytes : 0;
  void* const mapped =
      mmap(nullptr, length + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) no_memory(size, std::strerror(errno));
  auto* data = static_cast<std::byte*>(mapped);
  if (huge) {
    const auto address = reinterpret_cast<std::uintptr_t>(mapped);
    const std::size_t head = round_up(address, kHugePageBytes) - address;
    if (head != 0) munmap(data, head);
    if (slack != head) munmap(data + head + length, slack - head);
    data += head;
    madvise(data, length, MADV_HUGEPAGE);  // only a hint: small pages work too
  }
  touch(data, length, page_bytes);
  return {data, [length](std::byte* memory) { munmap(memory, length); }};
}

}  // namespace

Buffer::Buffer(Device device, std::size_t size, Place place) : size_(size), device_(device) {
  if (device.type == DeviceType::kCuda) {
    memory_ = place == Place::kPinnedHost ? allocate_cuda_pinned(device, size)
                                          : allocate_cuda(device, size);
  } else if (size > 0) {
    memory_ = allocate_host(size);
  }
}

void free_after(Device device, const Event& event) noexcept {
  if (device.type != DeviceType::kCuda) return;
  try {
    free_cuda_after(device, event);
  } catch (const std::exception&) {  // the device has failed and no longer works
  }
}

}  // namespace hsdp
