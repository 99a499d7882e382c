// A floating-point environment as an application may have left it on the calling thread.
#pragma once

#include <gtest/gtest.h>

#include <cfenv>
#include <optional>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hsdp::kernels {

// Until destroyed, flushes subnormal inputs and results and rounds towards zero.
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

// Runs `call`, in a spoilt environment if `spoilt`, and checks that it leaves that unchanged.
template <class Call>
void run_in_environment(bool spoilt, const Call& call) {
  std::optional<SpoiltEnvironment> environment;
  if (spoilt) environment.emplace();
  call();
  if (spoilt) {
    EXPECT_TRUE(environment->unchanged());
  }
}

}  // namespace hsdp::kernels
