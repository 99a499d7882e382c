#include "examples/demo/loss_plot.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "examples/demo/number_text.h"

namespace examples {
namespace {

constexpr double kWidth = 960;
constexpr double kHeight = 640;
constexpr const char* kInk = "#1b2530";
constexpr const char* kFaint = "#66727f";
constexpr const char* kGrid = "#e6eaef";
constexpr const char* kGapColour = "#7a5fb0";

// A part of the picture with its own axes: steps from 1, values on a logarithmic scale.
struct Panel {
  double left = 76;
  double right = kWidth - 36;
  double top = 0;
  double bottom = 0;
  double lowest_power = 0;  // of ten
  double highest_power = 1;
  std::size_t step_count = 1;

  [[nodiscard]] double x(double step) const {
    const double span = std::max<double>(1, static_cast<double>(step_count) - 1);
    return left + (right - left) * (step - 1) / span;
  }
  [[nodiscard]] double y(double value) const {
    const double power = std::log10(std::max(value, std::pow(10.0, lowest_power)));
    return bottom - (bottom - top) * (power - lowest_power) / (highest_power - lowest_power);
  }
};

void fit(Panel& panel, const std::vector<std::vector<double>>& series) {
  double lowest = INFINITY;
  double highest = 0;
  for (const std::vector<double>& values : series) {
    for (const double value : values) {
      if (std::isfinite(value) && value > 0) {
        lowest = std::min(lowest, value);
        highest = std::max(highest, value);
      }
    }
  }
  if (highest > 0) {
    panel.lowest_power = std::log10(lowest) - 0.1;
    panel.highest_power = std::max(std::log10(highest) + 0.1, panel.lowest_power + 1);
  }
}

class Drawing {
 public:
  Drawing() {
    svg_ << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << kWidth << "\" height=\""
         << kHeight << "\" viewBox=\"0 0 " << kWidth << ' ' << kHeight
         << "\" font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"13\">\n"
         << "<rect width=\"100%\" height=\"100%\" rx=\"10\" fill=\"#ffffff\"/>\n";
  }

  struct Text {
    double x = 0;
    double y = 0;
    std::string text;
    const char* colour = kFaint;
    const char* anchor = "start";
    const char* style = "";  // further attributes
  };
  void write(const Text& text) {
    svg_ << "<text x=\"" << text.x << "\" y=\"" << text.y << "\" fill=\"" << text.colour
         << "\" text-anchor=\"" << text.anchor << "\" " << text.style << '>' << text.text
         << "</text>\n";
  }

  void line(double x1, double y1, double x2, double y2, const std::string& colour, double width) {
    svg_ << "<line x1=\"" << x1 << "\" y1=\"" << y1 << "\" x2=\"" << x2 << "\" y2=\"" << y2
         << "\" stroke=\"" << colour << "\" stroke-width=\"" << width
         << "\" stroke-linecap=\"round\"/>\n";
  }

  void curve(const Panel& panel, const std::vector<double>& values, const std::string& colour,
             double width) {
    svg_ << "<polyline fill=\"none\" stroke-linejoin=\"round\" stroke=\"" << colour
         << "\" stroke-width=\"" << width << "\" points=\"";
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(values[i])) {
        svg_ << fixed_text(panel.x(static_cast<double>(i + 1)), 1) << ','
             << fixed_text(panel.y(values[i]), 1) << ' ';
      }
    }
    svg_ << "\"/>\n";
  }

  void axes(const Panel& panel, bool with_steps) {
    const int every = panel.highest_power - panel.lowest_power > 4 ? 2 : 1;
    for (int power = static_cast<int>(std::ceil(panel.lowest_power)); power <= panel.highest_power;
         power += every) {
      const double y = panel.y(std::pow(10.0, power));
      line(panel.left, y, panel.right, y, kGrid, 1);
      write({panel.left - 10, y + 4, short_text(std::pow(10.0, power)), kFaint, "end"});
    }
    if (!with_steps) {
      return;
    }
    const std::size_t tick = panel.step_count <= 20 ? 5 : panel.step_count <= 60 ? 10 : 25;
    for (std::size_t step = 0; step <= panel.step_count; step += tick) {
      const std::size_t shown = std::max<std::size_t>(step, 1);
      write({panel.x(static_cast<double>(shown)), panel.bottom + 22, std::to_string(shown), kFaint,
             "middle"});
    }
    write({(panel.left + panel.right) / 2, panel.bottom + 44, "step", kFaint, "middle"});
  }

  [[nodiscard]] std::string text() const { return svg_.str() + "</svg>\n"; }

 private:
  std::ostringstream svg_;
};

void draw_legend(Drawing& drawing, const std::vector<LossCurve>& curves) {
  double x = 76;
  for (const LossCurve& curve : curves) {
    drawing.line(x, 66, x + 26, 66, curve.colour, curve.width);
    drawing.write({x + 36, 70.5, curve.label, kInk});
    x += 60 + 7.3 * static_cast<double>(curve.label.size());
  }
}

std::vector<double> distance(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> result;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    result.push_back(std::abs(a[i] - b[i]));
  }
  return result;
}

}  // namespace

void write_loss_plot(const std::filesystem::path& path, const std::string& title,
                     const std::vector<LossCurve>& curves) {
  Panel losses{.top = 96, .bottom = 408};
  Panel gap{.top = 462, .bottom = 580};
  std::vector<std::vector<double>> series;
  for (const LossCurve& curve : curves) {
    series.push_back(curve.losses);
    losses.step_count = std::max(losses.step_count, curve.losses.size());
  }
  gap.step_count = losses.step_count;
  fit(losses, series);
  const std::vector<double> gaps = distance(curves.at(0).losses, curves.at(1).losses);
  fit(gap, {gaps});

  Drawing drawing;
  drawing.write({36, 38, title, kInk, "start", "font-size=\"18\" font-weight=\"600\""});
  draw_legend(drawing, curves);
  drawing.axes(losses, false);
  for (const LossCurve& curve : curves) {
    drawing.curve(losses, curve.losses, curve.colour, curve.width);
  }
  drawing.write({76, 450, "distance of the mesh from the single process", kInk});
  drawing.axes(gap, true);
  drawing.curve(gap, gaps, kGapColour, 1.6);

  std::ofstream file(path);
  file << drawing.text();
  file.close();
  if (!file) {
    throw std::runtime_error("plot: cannot write " + path.string());
  }
}

}  // namespace examples
