// Owning, page-aligned, zero-initialised memory of one device.
//
// Move-only. Host memory is touched when it is made, so that no page fault falls into a step.
// Throws Error when there is no memory.
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
  // kPinnedHost: in the host's memory, for kernels of a GPU that read and write it over its bus. On
  // the host both are the same.
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

// What a GPU's Buffers have now is freed after that Event, whenever their owners let go of it:
// where a GPU hangs in what nobody can end, and may go on later. Nothing happens on the host.
void free_after(Device device, const Event& event) noexcept;

}  // namespace hsdp
