// Gives kernels the default floating-point environment (nearest even, subnormals kept, no traps)
// whatever the calling thread has set, and restores the caller's afterwards.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace hsdp::kernels {

// Do the arithmetic in another function, called while this object is alive. A compiler may move
// floating-point operations across a change of the control register, but not across an opaque call.
class DefaultFloatEnvironment {
 public:
#if defined(__SSE2__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) {
    if (saved_ != kDefaultCsr) _mm_setcsr(kDefaultCsr);
  }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
#endif
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr unsigned kDefaultCsr = 0x1f80;
  unsigned saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace hsdp::kernels
