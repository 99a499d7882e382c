// Loss curves as a picture: an SVG file without scripts or embedded fonts.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace examples {

struct LossCurve {
  std::string label;
  std::string colour;  // "#1f5fa8"
  double width = 2;    // of the line, in pixels
  std::vector<double> losses;
};

// All curves over steps on a logarithmic axis, the first at the bottom; below, the distance of the
// second curve from the first. Throws std::runtime_error if the file cannot be written.
void write_loss_plot(const std::filesystem::path& path, const std::string& title,
                     const std::vector<LossCurve>& curves);

}  // namespace examples
