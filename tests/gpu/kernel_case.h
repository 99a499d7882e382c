// The cases that the bandwidth program measures, and their memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"

namespace hsdp::gpu {

constexpr Device kGpu{DeviceType::kCuda, 0};
constexpr std::int64_t kCompared = 1 << 20;  // elements that a check compares

// One kernel on rotating data, so that no launch finds its data in the cache.
struct Case {
  std::string name;
  double bytes = 0;                           // read and written by one launch
  std::function<void(int set)> launch;        // enqueues one launch
  std::function<std::string(int set)> check;  // after a launch: what is wrong, or nothing
};

// The memory for one array size. `set` picks one of the rotating sets of arrays.
class Arena {
 public:
  Arena(std::size_t array_bytes, Stream stream)
      : stream_(std::move(stream)),
        array_bytes_(array_bytes),
        set_bytes_(3 * array_bytes),
        sets_(
            static_cast<int>(std::clamp<std::size_t>((std::size_t{1} << 30U) / set_bytes_, 2, 6))),
        memory_(kGpu, set_bytes_ * static_cast<std::size_t>(sets_)),
        host_(array_bytes) {
    // Values that are finite in every dtype: as bf16 and as f16 their exponents are near that of 1.
    std::mt19937 random(1);
    for (std::size_t i = 0; i + 2 <= host_.size(); i += 2) {
      const auto bits = static_cast<std::uint16_t>((random() & 0x83ffU) | 0x3c00U);
      std::memcpy(host_.data() + i, &bits, 2);
    }
    for (int set = 0; set < sets_; ++set) reset(set);
  }

  void reset(int set) {
    for (int array = 0; array < 3; ++array) {
      copy_bytes(at(set, array), host_.data(), array_bytes_, stream_);
    }
    stream_.synchronize();
  }
  // Arrays 0 and 1 hold the host's values; array 2 is for output.
  [[nodiscard]] std::byte* at(int set, int array) const {
    return memory_.data() + static_cast<std::size_t>(set % sets_) * set_bytes_ +
           static_cast<std::size_t>(array) * array_bytes_;
  }
  [[nodiscard]] const std::byte* host() const { return host_.data(); }
  [[nodiscard]] std::size_t array_bytes() const { return array_bytes_; }
  [[nodiscard]] std::int64_t count(Dtype dtype) const {
    return static_cast<std::int64_t>(array_bytes_ / size_bytes(dtype));
  }
  [[nodiscard]] Stream& stream() { return stream_; }
  [[nodiscard]] std::vector<std::byte> read(const std::byte* from, std::size_t size) {
    std::vector<std::byte> bytes(size);
    copy_bytes(bytes.data(), from, size, stream_);
    stream_.synchronize();
    return bytes;
  }

 private:
  Stream stream_;
  std::size_t array_bytes_;
  std::size_t set_bytes_;
  int sets_;
  Buffer memory_;
  std::vector<std::byte> host_;
};

// The kernels of quant/quantize.h, with int4 in groups of 64, bf16 scales and int8 errors.
std::vector<Case> quantize_cases(Arena& arena);

}  // namespace hsdp::gpu
