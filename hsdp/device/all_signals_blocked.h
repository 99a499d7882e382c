// Blocks all signals on the calling thread while it starts another one, which inherits the mask:
// signals are for the application's threads.
#pragma once

#include <pthread.h>

#include <csignal>

namespace hsdp {

class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t saved_{};
};

}  // namespace hsdp
