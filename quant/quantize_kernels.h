// The implementations of quantize() and dequantize(). Arguments are already checked. Internal to
// quant/.
#pragma once

#include "hsdp/device/stream.h"
#include "quant/quantize.h"

namespace hsdp::quant {

// Element by element; returns whether a group is marked.
bool quantize_scalar(const Quantize& args);
bool dequantize_scalar(const Dequantize& args);

// With the current SIMD target; returns whether a group is marked.
bool quantize_simd(const Quantize& args);
bool dequantize_simd(const Dequantize& args);

// Only enqueue. In a build without CUDA, where no such stream can exist, no_device_quantize.cpp
// replaces them.
void quantize_on_device(const Quantize& args, const Stream& stream);
void dequantize_on_device(const Dequantize& args, const Stream& stream);

}  // namespace hsdp::quant
