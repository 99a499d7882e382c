// The findings of hsdp_check as text: a table that fits the terminal, then the verdict.
#pragma once

#include <cstddef>
#include <string>

#include "hsdp/compare.h"
#include "hsdp/validate.h"

namespace hsdp {

struct TextStyle {
  std::size_t width = 0;  // columns
  bool colour = false;
  bool all_rows = false;
};

// For standard output: width and colour of a terminal; otherwise $COLUMNS or ample width.
[[nodiscard]] TextStyle detect_text_style();
[[nodiscard]] std::string to_text(const Comparison& comparison, const TextStyle& style);
[[nodiscard]] std::string to_text(const Validation& validation, const TextStyle& style);

}  // namespace hsdp
