#include "hsdp/tools/text_table.h"

#include <gtest/gtest.h>

#include <sstream>

namespace hsdp {
namespace {

TextTable small_table() {
  TextTable table({{"name", false, 100}, {"value", true, 2}, {"note", false, 1}});
  table.add_row(' ', {"a", "1", "x"});
  table.add_row('!', {"a_rather_long_name_of_a_layer", "22", "y"});
  return table;
}

std::size_t longest_line(const std::string& text) {
  std::istringstream lines(text);
  std::size_t longest = 0;
  for (std::string line; std::getline(lines, line);) {
    longest = std::max(longest, display_width(line));
  }
  return longest;
}

TEST(TextTable, AlignsItsColumns) {
  EXPECT_EQ(small_table().render(200),
            "  name                           value  note\n"
            "  a                                  1  x\n"
            "! a_rather_long_name_of_a_layer     22  y\n");
}

TEST(TextTable, FitsEveryWidth) {
  for (std::size_t width = 12; width < 60; ++width) {
    EXPECT_LE(longest_line(small_table().render(width)), width) << width;
  }
}

TEST(TextTable, CutsNamesBeforeItLeavesColumnsOut) {
  EXPECT_EQ(small_table().render(36),
            "  name                   value  note\n"
            "  a                          1  x\n"
            "! a_rather_..of_a_layer     22  y\n");
}

TEST(CutMiddle, KeepsCharactersWhole) {
  EXPECT_EQ(cut_middle("h\xc3\xa9llo w\xc3\xb6rld", 8), "h\xc3\xa9l..rld");
  EXPECT_EQ(cut_middle("short", 8), "short");
  EXPECT_EQ(cut_middle("short", 2), "sh");
  EXPECT_EQ(cut_middle("short", 0), "");
}

}  // namespace
}  // namespace hsdp
