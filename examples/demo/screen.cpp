#include "examples/demo/screen.h"

#include <iomanip>
#include <sstream>

namespace examples {
namespace {

constexpr const char* kGreen = "1;32";
constexpr const char* kRed = "1;31";
constexpr const char* kGrey = "2";
constexpr const char* kBold = "1";
constexpr int kClaimWidth = 35;

constexpr std::size_t kDetailWidth = 90;

// Breaks text at spaces into lines that fit.
std::vector<std::string> wrapped(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (lines.empty() || lines.back().size() + 1 + word.size() > kDetailWidth) {
      lines.push_back(word);
    } else {
      lines.back() += " " + word;
    }
  }
  return lines;
}

}  // namespace

std::string Screen::painted(const std::string& text, const char* colour) const {
  return is_terminal_ ? std::string("\033[") + colour + "m" + text + "\033[0m" : text;
}

void Screen::erase_activity() {
  if (is_terminal_) {
    out_ << "\r\033[K";
  }
}

void Screen::title(const std::string& title, const std::vector<std::string>& subtitles) {
  out_ << "\n " << painted(title, kBold) << '\n';
  for (const std::string& subtitle : subtitles) {
    out_ << ' ' << subtitle << '\n';
  }
  out_ << '\n' << std::flush;
}

void Screen::doing(const std::string& activity) {
  if (is_terminal_) {
    erase_activity();
    out_ << painted("   ...  " + activity, kGrey) << std::flush;
  }
}

void Screen::show(const Claim& claim) {
  ++claim_count_;
  failed_count_ += claim.holds ? 0 : 1;
  erase_activity();
  out_ << (claim.holds ? painted("    ok", kGreen) : painted("FAILED", kRed)) << "  " << std::left
       << std::setw(kClaimWidth) << claim.claim << ' ' << claim.number << '\n';
  for (const std::string& detail : claim.details) {
    for (const std::string& line : wrapped(detail)) {
      out_ << "        " << painted(line, kGrey) << '\n';
    }
  }
  out_ << std::flush;
}

void Screen::file(const std::string& what, const std::string& path) {
  erase_activity();
  out_ << "        " << std::left << std::setw(kClaimWidth) << what << ' ' << path << '\n';
}

void Screen::end(double seconds) {
  erase_activity();
  const std::string verdict = failed_count_ == 0
                                  ? painted("all hold", kGreen)
                                  : painted(std::to_string(failed_count_) + " FAILED", kRed);
  out_ << '\n'
       << ' ' << claim_count_ << " claims, " << verdict << ", " << std::fixed
       << std::setprecision(0) << seconds << " s\n"
       << std::endl;
}

}  // namespace examples
