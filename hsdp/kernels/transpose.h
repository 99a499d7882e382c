// Gathers a small block of 2-, 4- or 8-byte elements into dense rows. Internal to hsdp/kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hsdp::kernels {

struct StridedBlock {
  const std::byte* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;  // in elements
  std::int64_t column_stride = 0;
  std::int64_t out_stride = 0;
  std::size_t element_bytes = 4;
};

// out[r * out_stride + c] = element (r, c), without overlap.
void gather(const StridedBlock& block, std::byte* out);

}  // namespace hsdp::kernels
