// What a caller captures into a CUDA graph meanwhile.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

namespace hsdp::stand_in {

// A capture of that stream, which must be whole in the end.
class Capture {
 public:
  explicit Capture(void* stream, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal)
      : stream_(static_cast<cudaStream_t>(stream)) {
    EXPECT_EQ(cudaStreamBeginCapture(stream_, mode), cudaSuccess);
  }
  ~Capture() {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess) << "not whole any more";
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  cudaStream_t stream_;
};

}  // namespace hsdp::stand_in
