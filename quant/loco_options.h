// The options of LocoHop. docs/loco.md says how to choose them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/dtype.h"
#include "quant/group_format.h"

namespace hsdp::quant {

struct LocoOptions {
  int bits = 4;                        // of a scattered code: 4 or 8
  int group_size = 64;                 // a multiple of 32 from 32 to 4096
  Dtype scale_dtype = Dtype::kBf16;    // or f32
  double err_beta = 0.8;               // weight of the old error, in [0, 1)
  std::int64_t reset_T = 1024;         // clear the errors every this many steps; 0: never
  Dtype error_dtype = Dtype::kU8;      // u8: int8 codes with one fp32 scale per group; or f32
  std::optional<Code> gather{};        // format of the gathered half; none: as scattered
  bool error_feedback = true;          // false: quantize without errors
  std::vector<std::string> exclude{};  // parameters sent unquantized: names, or fnmatch patterns
  std::optional<Dtype> plain_dtype{};  // wire dtype of these; none: the Reducer's replica_dtype
  std::int64_t warmup_steps = 0;       // in these first steps nothing is quantized
  bool stochastic_error = false;       // round int8 errors stochastically
  std::uint64_t seed = 0;              // for stochastic_error
  std::int64_t error_every = 16;       // steps between figures for quantization_error(); 0: never
};

// Throws UsageError, naming the option, unless all options are valid.
void require_valid(const LocoOptions& options);

// "0.8": enough digits to distinguish any two floats.
[[nodiscard]] std::string number_text(double value);

// Equal options give equal text of at most 127 bytes.
[[nodiscard]] std::string describe(const LocoOptions& options);

// Whether a pattern of `exclude` matches.
[[nodiscard]] bool is_excluded(const LocoOptions& options, const std::string& name);

}  // namespace hsdp::quant
