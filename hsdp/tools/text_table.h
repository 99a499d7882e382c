// A table of text that fits a width: drops the least important columns first, then cuts the longest
// text in its middle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hsdp {

struct TextColumn {
  std::string title;
  bool right_aligned = true;
  int importance = 0;  // the least important columns are dropped first; the most important never
};

class TextTable {
 public:
  explicit TextTable(std::vector<TextColumn> columns) : columns_(std::move(columns)) {}

  // One cell per column. `mark` precedes the row in an extra column.
  void add_row(char mark, std::vector<std::string> cells);
  [[nodiscard]] std::string render(std::size_t width) const;

 private:
  struct Row {
    char mark;
    std::vector<std::string> cells;
  };
  [[nodiscard]] std::vector<std::size_t> fit(std::vector<std::size_t>& widths,
                                             std::size_t width) const;

  std::vector<TextColumn> columns_;
  std::vector<Row> rows_;
};

[[nodiscard]] std::string count_text(std::int64_t count);  // 12,345,678
// Columns that UTF-8 text takes on a terminal, judged by its code points.
[[nodiscard]] std::size_t display_width(std::string_view text);
// At most `width` columns; ".." replaces the middle.
[[nodiscard]] std::string cut_middle(std::string_view text, std::size_t width);

}  // namespace hsdp
