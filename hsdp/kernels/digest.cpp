#include "hsdp/kernels/digest.h"

#include <cstring>

#include "hsdp/kernels/device_digest.h"
#include "hsdp/kernels/device_kernels.h"

namespace hsdp::kernels {

std::uint64_t digest_places(ConstTensorView values) {
  return (values.size_in_bytes() + kDigestBytes - 1) / kDigestBytes;
}

std::uint64_t digest(ConstTensorView values, std::uint64_t place) {
  const auto* const data = static_cast<const char*>(values.data);
  const auto bytes = static_cast<std::int64_t>(values.size_in_bytes());
  const std::int64_t whole = bytes / kDigestBytes;
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < whole; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i * kDigestBytes, kDigestBytes);
    sum += digest_of_word(word, place + static_cast<std::uint64_t>(i));
  }
  const std::int64_t done = whole * kDigestBytes;
  if (done == bytes) return sum;
  return sum + digest_of_word(last_digest_word(data + done, bytes - done),
                              place + static_cast<std::uint64_t>(whole));
}

void add_digest(ConstTensorView values, std::uint64_t place, std::uint64_t* sum,
                const Stream& stream) {
  if (values.count == 0) return;
  if (stream.device().type == DeviceType::kHost) {
    *sum += digest(values, place);
    return;
  }
  add_digest_on_device(values, place, sum, stream);
}

}  // namespace hsdp::kernels
