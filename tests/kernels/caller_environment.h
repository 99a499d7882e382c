// A thread whose floating-point environment the application has spoilt.
#pragma once

#include <cfenv>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hsdp::kernels {

// Flushes subnormals both ways and rounds towards zero, until destroyed.
class SpoiltEnvironment {
 public:
  SpoiltEnvironment() {
    std::fegetenv(&saved_);
    std::fesetround(FE_TOWARDZERO);
#if defined(__SSE2__)
    _mm_setcsr(_mm_getcsr() | 0x8040U);
    spoilt_ = _mm_getcsr();
#endif
  }
  ~SpoiltEnvironment() { std::fesetenv(&saved_); }
  SpoiltEnvironment(const SpoiltEnvironment&) = delete;
  SpoiltEnvironment& operator=(const SpoiltEnvironment&) = delete;

  [[nodiscard]] bool unchanged() const {
#if defined(__SSE2__)
    if (_mm_getcsr() != spoilt_) return false;
#endif
    return std::fegetround() == FE_TOWARDZERO;
  }

 private:
  std::fenv_t saved_{};
  unsigned spoilt_ = 0;
};

}  // namespace hsdp::kernels
