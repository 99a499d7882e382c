#include "hsdp/tools/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>

namespace hsdp {
namespace {

using namespace std::chrono_literals;
constexpr auto kPatience = 500ms;
constexpr auto kInterval = 100ms;
constexpr int kCells = 32;

}  // namespace

ProgressBar::ProgressBar()
    : begin_(std::chrono::steady_clock::now()),
      next_(begin_ + kPatience),
      terminal_(::isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
}

void ProgressBar::show(double fraction) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ || now < next_) return;
  next_ = now + kInterval;
  const double elapsed_s = std::chrono::duration<double>(now - begin_).count();
  const int cells = std::clamp(static_cast<int>(fraction * kCells), 0, kCells);
  std::string bar(static_cast<std::size_t>(cells), '#');
  bar.resize(kCells, '.');
  const double left_s = fraction > 0 ? elapsed_s * (1 - fraction) / fraction : 0;
  std::fprintf(stderr, "\r\x1b[K[%s] %3.0f%%  %.0f s left", bar.c_str(), fraction * 100,
               std::ceil(left_s));
  drawn_ = true;
}

}  // namespace hsdp
