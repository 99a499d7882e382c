#include "hsdp/tools/check_text.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "hsdp/snapshot/snapshot_header.h"
#include "hsdp/tools/check_facts.h"
#include "hsdp/tools/text_table.h"

namespace hsdp {
namespace {

constexpr std::size_t kMaxRows = 40;
constexpr std::size_t kAmpleWidth = 200;
constexpr std::size_t kNarrowest = 40;

std::string coloured(const std::string& text, const char* colour, bool wanted) {
  return wanted ? std::string("\x1b[1;") + colour + "m" + text + "\x1b[0m" : text;
}

std::string rest_text(std::size_t rows, const TextStyle& style) {
  if (style.all_rows || rows <= kMaxRows) return {};
  return "  ... " + count_text(static_cast<std::int64_t>(rows - kMaxRows)) + " more: --all\n";
}

std::size_t shown_rows(std::size_t rows, const TextStyle& style) {
  return style.all_rows ? rows : std::min(rows, kMaxRows);
}

std::string pair_text(const ParameterDifference& parameter) {
  if (parameter.worst.index < 0) return "-";
  return value_text(parameter.worst.a) + " / " + value_text(parameter.worst.b);
}

std::string place_text(const ParameterDifference& parameter, bool partial) {
  if (parameter.worst.index < 0) return "-";
  return position_text(parameter.worst.index, parameter.shape) +
         (partial ? " replica " + std::to_string(parameter.worst.replica) : "");
}

std::string cosine_text(double cosine) { return value_text(cosine).substr(0, 11); }

// Only what the run has: no column of zeros.
std::string notes_text(const ParameterDifference& parameter) {
  if (parameter.nonfinite_a == 0 && parameter.nonfinite_b == 0) return {};
  return "NaN/inf: " + count_text(parameter.nonfinite_a) + " / " +
         count_text(parameter.nonfinite_b);
}

std::string side_text(const char* label, const std::filesystem::path& path,
                      const SnapshotInfo& info) {
  return std::string("  ") + label + "  " + printable(path.string(), kMaxNameBytes) + "  (" +
         run_text(info) + ")\n";
}

}  // namespace

TextStyle detect_text_style() {
  TextStyle style;
  style.width = kAmpleWidth;
  winsize size{};
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  if (terminal && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col != 0) {
    style.width = size.ws_col;
  } else if (const char* columns = std::getenv("COLUMNS")) {
    const std::string_view text(columns);
    std::from_chars(text.data(), text.data() + text.size(), style.width);
  }
  style.width = std::max(style.width, kNarrowest);
  style.colour = terminal && std::getenv("NO_COLOR") == nullptr;
  return style;
}

std::string to_text(const Comparison& comparison, const TextStyle& style) {
  TextTable table({{"parameter", false, 100},
                   {"shape", false, 2},
                   {"dtype", false, 1},
                   {"max|a-b|", true, 8},
                   {"max rel", true, 7},
                   {"rel L2", true, 9},
                   {"ULP", true, 6},
                   {"cosine", true, 4},
                   {"worst at", false, 5},
                   {"a / b there", false, 3},
                   {"", false, 10}});
  const std::size_t rows = shown_rows(comparison.parameters.size(), style);
  for (std::size_t i = 0; i < rows; ++i) {
    const ParameterDifference& p = comparison.parameters[i];
    const bool differs = p.verdict == Verdict::kDifferent;
    table.add_row(
        differs ? '!' : ' ',
        {printable(p.name, kMaxNameBytes), to_string(p.shape), std::string(name(p.coarsest)),
         number_text(p.max_absolute), number_text(p.max_relative), number_text(p.relative_l2),
         ulp_text(p.max_ulp), cosine_text(p.cosine), place_text(p, comparison.a.partial),
         pair_text(p), notes_text(p)});
  }
  const char* colour = comparison.verdict == Verdict::kSame        ? "32"
                       : comparison.verdict == Verdict::kDifferent ? "31"
                                                                   : "33";
  return side_text("a", comparison.path_a, comparison.a) +
         side_text("b", comparison.path_b, comparison.b) + "  same: " + criterion_text(comparison) +
         "\n\n" + table.render(style.width) + rest_text(comparison.parameters.size(), style) +
         "\n" + coloured(verdict_text(comparison), colour, style.colour) + "\n";
}

std::string to_text(const Validation& validation, const TextStyle& style) {
  TextTable table({{"parameter", false, 100},
                   {"shape", false, 2},
                   {"max|x|", true, 3},
                   {"L2 norm", true, 4},
                   {"NaN/inf", true, 5},
                   {"replicas", false, 6}});
  const std::size_t rows = shown_rows(validation.parameters.size(), style);
  for (std::size_t i = 0; i < rows; ++i) {
    const ParameterCheck& p = validation.parameters[i];
    std::string replicas = "equal";
    if (validation.copy_count == 1) replicas = "one";
    if (validation.info.partial) replicas = "partials";
    if (p.first_unequal >= 0) {
      replicas =
          std::to_string(p.unequal_copy) + " differs at " + position_text(p.first_unequal, p.shape);
    }
    table.add_row(p.sound() ? ' ' : '!', {printable(p.name, kMaxNameBytes), to_string(p.shape),
                                          number_text(p.max_absolute), number_text(p.norm),
                                          count_text(p.nonfinite), replicas});
  }
  return side_text("a", validation.path, validation.info) + "\n" + table.render(style.width) +
         rest_text(validation.parameters.size(), style) + "\n" +
         coloured(verdict_text(validation), validation.sound() ? "32" : "31", style.colour) + "\n";
}

}  // namespace hsdp
