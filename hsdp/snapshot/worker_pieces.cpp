#include "hsdp/snapshot/worker_pieces.h"

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/device/all_signals_blocked.h"
#include "hsdp/kernels/float_environment.h"

namespace hsdp {
namespace {

constexpr unsigned kMaxThreads = 8;

class Line {
 public:
  explicit Line(std::size_t piece_count) : piece_count_(piece_count) {}

  void work(const std::function<PieceWorker()>& make_worker) {
    try {
      const PieceWorker worker = make_worker();
      for (std::size_t piece = next(); piece < piece_count_; piece = next()) {
        take(piece, worker(piece));
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      next_ = piece_count_;
    }
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::size_t next() {
    const std::lock_guard lock(mutex_);
    return next_ < piece_count_ ? next_++ : piece_count_;
  }

  // Keeps early results until those before them are taken.
  void take(std::size_t piece, PieceTaker taker) {
    const std::lock_guard lock(mutex_);
    waiting_.emplace(piece, std::move(taker));
    while (!waiting_.empty() && waiting_.begin()->first == taken_) {
      waiting_.begin()->second();
      waiting_.erase(waiting_.begin());
      ++taken_;
    }
  }

  const std::size_t piece_count_;
  std::mutex mutex_;
  std::size_t next_ = 0;
  std::size_t taken_ = 0;
  std::map<std::size_t, PieceTaker> waiting_;
  std::exception_ptr error_;
};

}  // namespace

void run_pieces(std::size_t piece_count, int thread_count,
                const std::function<PieceWorker()>& make_worker) {
  const kernels::DefaultFloatEnvironment subnormals_count;  // on the other threads, too
  const unsigned cores = std::clamp(std::thread::hardware_concurrency(), 1U, kMaxThreads);
  const std::size_t threads = std::min<std::size_t>(
      piece_count, thread_count > 0 ? static_cast<unsigned>(thread_count) : cores);
  Line line(piece_count);
  {
    std::vector<std::jthread> others;
    {
      const AllSignalsBlocked blocked;
      for (std::size_t i = 1; i < threads; ++i) {
        others.emplace_back([&] { line.work(make_worker); });
      }
    }
    line.work(make_worker);
  }
  line.rethrow();
}

}  // namespace hsdp
