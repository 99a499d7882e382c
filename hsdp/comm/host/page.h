// The unit in which memory is mapped and shared.
#pragma once

#include <cstddef>

namespace hsdp::comm {

constexpr std::size_t kPageBytes = 4096;

constexpr std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace hsdp::comm
