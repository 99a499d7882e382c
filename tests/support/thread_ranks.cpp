#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <ostream>
#include <string>
#include <thread>

namespace hsdp::test {
namespace {

constexpr std::chrono::seconds kGraceAfterDeadline{10};

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

class Ranks {
 public:
  Ranks(int size, const RankBody& body, const ThreadRanksOptions& options)
      : body_(body),
        worlds_(in_process_world(
            size, WorldOptions{.timeout = options.timeout, .transport = options.transport})),
        errors_(worlds_.size()),
        returned_(worlds_.size(), false) {}

  std::vector<std::exception_ptr> run(std::chrono::seconds deadline) {
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < worlds_.size(); ++rank) {
      threads.emplace_back([this, rank] { run_rank(rank); });
    }
    if (!wait_until_all_returned(deadline)) {
      worlds_.front().abort("test: deadline of the test passed");
      if (!wait_until_all_returned(kGraceAfterDeadline)) give_up();
      ADD_FAILURE() << "the ranks did not return within " << deadline.count() << " s";
    }
    for (std::thread& thread : threads) thread.join();
    return errors_;
  }

 private:
  void run_rank(std::size_t rank) {
    // A copy, so that the rank's last use of its world is on its own thread.
    Communicator world = worlds_[rank];
    try {
      body_(world);
    } catch (const std::exception& error) {
      errors_[rank] = std::current_exception();
      world.abort("test: rank " + std::to_string(rank) + " threw: " + error.what());
    } catch (...) {
      errors_[rank] = std::current_exception();
      world.abort("test: rank " + std::to_string(rank) + " threw");
    }
    const std::lock_guard lock(mutex_);
    returned_[rank] = true;
    some_returned_.notify_all();
  }

  bool wait_until_all_returned(std::chrono::seconds limit) {
    std::unique_lock lock(mutex_);
    return some_returned_.wait_for(lock, limit, [this] {
      for (const bool returned : returned_) {
        if (!returned) return false;
      }
      return true;
    });
  }

  [[noreturn]] void give_up() {
    const std::lock_guard lock(mutex_);
    for (std::size_t rank = 0; rank < returned_.size(); ++rank) {
      if (!returned_[rank]) std::fprintf(stderr, "thread_ranks: rank %zu hangs\n", rank);
    }
    std::abort();
  }

  const RankBody& body_;
  std::vector<Communicator> worlds_;
  std::vector<std::exception_ptr> errors_;
  std::mutex mutex_;
  std::condition_variable some_returned_;
  std::vector<bool> returned_;
};

}  // namespace

std::vector<std::exception_ptr> try_ranks(int size, const RankBody& body,
                                          const ThreadRanksOptions& options) {
  return Ranks(size, body, options).run(options.deadline);
}

void run_ranks(int size, const RankBody& body, const ThreadRanksOptions& options) {
  const std::vector<std::exception_ptr> errors = try_ranks(size, body, options);
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank]) ADD_FAILURE() << "rank " << rank << " threw: " << text_of(errors[rank]);
  }
}

std::string to_string(MeshShape shape) {
  return std::to_string(shape.replicate) + "x" + std::to_string(shape.shard);
}

void PrintTo(MeshShape shape, std::ostream* out) { *out << to_string(shape); }

void run_mesh(MeshShape shape, const MeshBody& body, const ThreadRanksOptions& options) {
  run_ranks(
      shape.size(),
      [&](Communicator& world) {
        const Mesh mesh(world, MeshOptions{.replicate = shape.replicate, .shard = shape.shard});
        body(mesh);
      },
      options);
}

std::chrono::milliseconds within_two_seconds() {
  double load = 0.0;
  const double cores = std::max(1U, std::thread::hardware_concurrency());
  const bool overrun = ::getloadavg(&load, 1) == 1 && load > 4.0 * cores;
  return std::chrono::seconds(overrun ? 15 : 2);
}

}  // namespace hsdp::test
