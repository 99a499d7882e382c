// Runs the body of a kernel on a stream. Internal to the .cu files.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "hsdp/device/cuda_call.h"
#include "hsdp/device/stream.h"
#include "hsdp/kernels/device_block.h"

namespace hsdp::kernels {

template <class Body>
__global__ void __launch_bounds__(Block::kThreads, Body::kResident)
    run_body(const __grid_constant__ Body body) {
  __shared__ typename Body::Shared shared;
  body(Block(blockIdx.x, gridDim.x), shared);
}

// As many blocks as fit on the device at once.
template <class Body>
std::int64_t most_blocks(Device device) {
  int processors = 0;
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device.index),
             device, "count its multiprocessors");
  int blocks = 0;
  check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, run_body<Body>, Block::kThreads, 0),
      device, "run this kernel");
  return std::max(1, blocks) * static_cast<std::int64_t>(processors);
}

// `blocks` is how many blocks the work could use; the bodies loop when fewer are launched.
template <class Body>
void launch(const Body& body, std::int64_t blocks, const Stream& stream) {
  static_assert(sizeof(Body) <= 4096, "the arguments of a kernel");
  const OnCudaDevice current(stream.device());
  // The GPUs of a machine are alike: one GPU's limit holds for all.
  static const std::int64_t most = most_blocks<Body>(stream.device());
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, most));
  Body argument = body;
  void* arguments[] = {&argument};
  check_cuda(cudaLaunchKernel(run_body<Body>, dim3(grid), dim3(Block::kThreads), arguments, 0,
                              static_cast<cudaStream_t>(stream.native_handle())),
             stream.device(), "start a kernel");
}

// How many blocks give each thread one of `items`.
inline std::int64_t blocks_for(std::int64_t items) {
  return (items + Block::kThreads - 1) / Block::kThreads;
}

}  // namespace hsdp::kernels
