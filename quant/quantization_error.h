// How much quantization changes a gradient.
#pragma once

#include <string>

namespace hsdp::quant {

// |h - d| / |h|, in Euclidean norms over this rank's part of a parameter; usually 0.08 to 0.17 with
// 4 bits. h is what was to be sent, d what was sent.
struct QuantizationError {
  std::string parameter;
  double scattered = 0.0;  // on the way to the owners
  double gathered = 0.0;   // for the sums this rank owns; 0 if it owns none
};

}  // namespace hsdp::quant
