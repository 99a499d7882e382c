// Owning, page-aligned, zero-initialised memory of one device.
//
// Move-only. The constructor touches host memory, so that no step takes page faults. Throws Error
// when there is no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "hsdp/device/event.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

class Buffer {
 public:
  // kPinnedHost: host memory that a GPU's kernels read and write over the bus. On the host both are
  // the same.
  enum class Place : std::uint8_t { kDevice, kPinnedHost };

  Buffer() = default;
  Buffer(Device device, std::size_t size, Place place = Place::kDevice);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() = default;

  [[nodiscard]] std::byte* data() const { return memory_.get(); }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] TensorView view(Dtype dtype) const {
    return {data(), static_cast<std::int64_t>(size_ / size_bytes(dtype)), dtype, device_};
  }

 private:
  void swap(Buffer& other) noexcept {
    memory_.swap(other.memory_);
    std::swap(size_, other.size_);
    std::swap(device_, other.device_);
  }

  std::shared_ptr<std::byte> memory_;
  std::size_t size_ = 0;
  Device device_{};
};

// Defers freeing the memory of all current Buffers of a GPU until `event`, whenever their owners
// destroy them. For a GPU that hangs in work that cannot be cancelled and may resume later. No
// effect on the host.
void free_after(Device device, const Event& event) noexcept;

}  // namespace hsdp
