// A progress bar on standard error, for work that takes noticeably long.
#pragma once

#include <chrono>

namespace hsdp {

class ProgressBar {
 public:
  ProgressBar();   // shows nothing unless standard error is a terminal
  ~ProgressBar();  // wipes the line
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void show(double fraction);

 private:
  std::chrono::steady_clock::time_point begin_;
  std::chrono::steady_clock::time_point next_;
  bool terminal_;
  bool drawn_ = false;
};

}  // namespace hsdp
