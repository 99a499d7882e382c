// Numbers as the screen and the plot print them.
#pragma once

#include <ios>
#include <sstream>
#include <string>

namespace examples {

// So many digits after the point.
[[nodiscard]] inline std::string fixed_text(double value, int digits) {
  std::ostringstream text;
  text.precision(digits);
  text << std::fixed << value;
  return text.str();
}

// So many digits in all, without trailing zeros.
[[nodiscard]] inline std::string short_text(double value, int digits = 6) {
  std::ostringstream text;
  text.precision(digits);
  text << value;
  return text.str();
}

}  // namespace examples
