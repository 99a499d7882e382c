// How much quantization changes a gradient.
#pragma once

#include <string>

namespace hsdp::quant {

// |h - d| / |h|, Euclidean norms over what this rank has of a parameter; 0.08 to 0.17 is usual with
// 4 bits. h is what there was to send, d what was sent.
struct QuantizationError {
  std::string parameter;
  double scattered = 0.0;  // to the owners
  double gathered = 0.0;   // of the sums that this rank owns; 0 where it owns none
};

}  // namespace hsdp::quant
