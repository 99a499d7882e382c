// Selects instruction sets worth their compile time. Include before any Highway header.
//
// SSSE3 machines run the baseline. The AVX-512 subsets that some versions of Highway add (bits 4, 6
// and 7) gain nothing here. The kernels keep vectors in arrays; scalable vectors cannot do that.
#pragma once

#include <hwy/detect_compiler_arch.h>

#ifndef HWY_DISABLED_TARGETS
#if HWY_ARCH_X86
#define HWY_DISABLED_TARGETS ((1LL << 4) | (1LL << 6) | (1LL << 7) | (1LL << 12))
#elif HWY_ARCH_ARM
#define HWY_DISABLED_TARGETS \
  ((1LL << 18) | (1LL << 19) | (1LL << 24) | (1LL << 25) | (1LL << 26) | (1LL << 27))
#endif
#endif
