// The demo's screen: one line per claim, with a number and a verdict.
//
// Colours and notes about the current activity appear only on terminals.
#pragma once

#include <ostream>
#include <string>
#include <vector>

namespace examples {

struct Claim {
  std::string claim;
  std::string number;  // what was measured
  bool holds = false;
  std::vector<std::string> details;  // lines below
};

class Screen {
 public:
  Screen(std::ostream& out, bool is_terminal) : out_(out), is_terminal_(is_terminal) {}

  void title(const std::string& title, const std::vector<std::string>& subtitles);
  void doing(const std::string& activity);  // until the next line
  void show(const Claim& claim);
  void file(const std::string& what, const std::string& path);
  void end(double seconds);

  [[nodiscard]] bool all_hold() const { return claim_count_ > 0 && failed_count_ == 0; }

 private:
  [[nodiscard]] std::string painted(const std::string& text, const char* colour) const;
  void erase_activity();

  std::ostream& out_;
  bool is_terminal_;
  int claim_count_ = 0;
  int failed_count_ = 0;
};

}  // namespace examples
