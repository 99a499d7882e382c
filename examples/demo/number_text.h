// Numbers as printed on the screen and the plot.
#pragma once

#include <ios>
#include <sstream>
#include <string>

namespace examples {

// With `digits` digits after the point.
[[nodiscard]] inline std::string fixed_text(double value, int digits) {
  std::ostringstream text;
  text.precision(digits);
  text << std::fixed << value;
  return text.str();
}

// With `digits` significant digits, without trailing zeros.
[[nodiscard]] inline std::string short_text(double value, int digits = 6) {
  std::ostringstream text;
  text.precision(digits);
  text << value;
  return text.str();
}

}  // namespace examples
