// A CUDA graph that a caller captures during a test.
#pragma once

#include <gtest/gtest.h>

#include "cuda_stand_in.h"

namespace hsdp::stand_in {

// Captures that stream; the capture must be whole at the end.
class Capture {
 public:
  explicit Capture(void* stream, bool of_all_threads = true) : stream_(stream) {
    EXPECT_TRUE(begin_capture(stream, of_all_threads));
  }
  ~Capture() { EXPECT_TRUE(end_capture(stream_)) << "not whole any more"; }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  void* stream_;
};

}  // namespace hsdp::stand_in
