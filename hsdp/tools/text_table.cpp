#include "hsdp/tools/text_table.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace hsdp {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kMinWidth = 8;  // of a column whose text is cut

bool continues(char c) { return (static_cast<unsigned char>(c) & 0xc0U) == 0x80U; }

// The length in bytes of the first `count` code points.
std::size_t prefix_bytes(std::string_view text, std::size_t count) {
  std::size_t at = 0;
  for (; at < text.size() && count > 0; --count) {
    ++at;
    while (at < text.size() && continues(text[at])) ++at;
  }
  return at;
}

std::string pad(const std::string& text, std::size_t width, bool right_aligned) {
  const std::string fill(width - std::min(width, display_width(text)), ' ');
  return right_aligned ? fill + text : text + fill;
}

void trim_right(std::string& line) { line.erase(line.find_last_not_of(' ') + 1); }

}  // namespace

std::string count_text(std::int64_t count) {
  const std::string digits = std::to_string(count);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i != 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::size_t display_width(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return !continues(c); }));
}

std::string cut_middle(std::string_view text, std::size_t width) {
  const std::size_t points = display_width(text);
  if (points <= width) return std::string(text);
  if (width <= 2) return std::string(text.substr(0, prefix_bytes(text, width)));
  const std::size_t left = (width - 2) / 2;
  const std::size_t right = width - 2 - left;
  std::string result(text.substr(0, prefix_bytes(text, left)));
  result += "..";
  result += text.substr(prefix_bytes(text, points - right));
  return result;
}

void TextTable::add_row(char mark, std::vector<std::string> cells) {
  rows_.push_back({mark, std::move(cells)});
}

// The columns to show, in order; adjusts the width of the column that is cut.
std::vector<std::size_t> TextTable::fit(std::vector<std::size_t>& widths, std::size_t width) const {
  std::vector<std::size_t> shown(columns_.size());
  std::iota(shown.begin(), shown.end(), std::size_t{0});
  const auto total = [&] {
    std::size_t sum = 0;
    for (const std::size_t i : shown) sum += kGap + widths[i];
    return sum;
  };
  const std::size_t widest =
      static_cast<std::size_t>(std::max_element(widths.begin(), widths.end()) - widths.begin());
  // Cut an overlong column to a third of the width, then drop columns, then cut further.
  if (total() > width) widths[widest] = std::min(widths[widest], std::max(kMinWidth, width / 3));
  while (total() > width && shown.size() > 1) {
    const auto least = std::min_element(shown.begin(), shown.end(), [&](auto x, auto y) {
      return columns_[x].importance < columns_[y].importance;
    });
    shown.erase(least);
  }
  if (total() > width) {
    const std::size_t excess = total() - width;
    std::size_t& last = widths[shown.front()];
    last = last > excess + kMinWidth ? last - excess : kMinWidth;
  } else if (std::find(shown.begin(), shown.end(), widest) != shown.end()) {
    std::size_t natural = display_width(columns_[widest].title);
    for (const Row& row : rows_) natural = std::max(natural, display_width(row.cells[widest]));
    widths[widest] = std::min(natural, widths[widest] + (width - total()));
  }
  return shown;
}

std::string TextTable::render(std::size_t width) const {
  std::vector<std::size_t> widths;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    widths.push_back(display_width(columns_[i].title));
    for (const Row& row : rows_) widths[i] = std::max(widths[i], display_width(row.cells[i]));
  }
  const std::vector<std::size_t> shown = fit(widths, width);
  std::string text;
  std::string line;
  const auto put = [&](std::size_t column, const std::string& cell) {
    line += (line.size() == 1 ? " " : "  ") +
            pad(cut_middle(cell, widths[column]), widths[column], columns_[column].right_aligned);
  };
  const auto end_line = [&] {
    trim_right(line);
    text += line + '\n';
  };
  line = " ";
  for (const std::size_t i : shown) put(i, columns_[i].title);
  end_line();
  for (const Row& row : rows_) {
    line = row.mark;
    for (const std::size_t i : shown) put(i, row.cells[i]);
    end_line();
  }
  return text;
}

}  // namespace hsdp
