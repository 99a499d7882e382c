// What stands behind quantize() and dequantize(); arguments are already checked. Internal to
// quant/.
#pragma once

#include "hsdp/device/stream.h"
#include "quant/quantize.h"

namespace hsdp::quant {

// Element by element; whether a group is marked.
bool quantize_scalar(const Quantize& args);
bool dequantize_scalar(const Dequantize& args);

// With the SIMD target in use; whether a group is marked.
bool quantize_simd(const Quantize& args);
bool dequantize_simd(const Dequantize& args);

// Enqueue only. no_device_quantize.cpp takes their place in a build without CUDA, where no such
// stream can exist.
void quantize_on_device(const Quantize& args, const Stream& stream);
void dequantize_on_device(const Dequantize& args, const Stream& stream);

}  // namespace hsdp::quant
