// A table of text whose columns fit a width: the least important columns go first, then the widest
// text is cut in its middle.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace hsdp {

struct TextColumn {
  std::string title;
  bool right_aligned = true;
  int importance = 0;  // columns of least importance are left out first; the highest never
};

class TextTable {
 public:
  explicit TextTable(std::vector<TextColumn> columns) : columns_(std::move(columns)) {}

  // One cell for each column. `mark` stands before the row, in a column of its own.
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

// Columns that UTF-8 text takes on a terminal, as far as code points tell.
[[nodiscard]] std::size_t display_width(std::string_view text);
// At most `width` columns; the middle gives way to "..".
[[nodiscard]] std::string cut_middle(std::string_view text, std::size_t width);

}  // namespace hsdp
