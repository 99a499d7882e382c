// Splits a stream of bytes into lines and puts a prefix before each.
#pragma once

#include <string>
#include <string_view>

namespace hsdp::tools {

class LinePrefixer {
 public:
  // Longer lines are split, so that a program that never ends its line cannot fill the memory.
  static constexpr std::size_t kMaxLineBytes = 1U << 20U;

  explicit LinePrefixer(std::string prefix) : prefix_(std::move(prefix)) {}

  // Returns the lines that are now complete, each with prefix and newline; keeps the rest.
  [[nodiscard]] std::string feed(std::string_view bytes) {
    std::string ready;
    for (const char c : bytes) {
      line_ += c;
      if (c == '\n' || line_.size() >= kMaxLineBytes) ready += finish();
    }
    return ready;
  }

  // Returns the last line if it has no newline yet.
  [[nodiscard]] std::string finish() {
    if (line_.empty()) return {};
    std::string whole = prefix_ + line_ + (line_.back() == '\n' ? "" : "\n");
    line_.clear();
    return whole;
  }

 private:
  std::string prefix_;
  std::string line_;
};

}  // namespace hsdp::tools
