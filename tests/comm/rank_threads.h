// Runs the ranks of a world as threads, over the transports of the contract tests.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/world.h"
#include "tests/comm/stage_control.h"

namespace hsdp::test {

// kDirect: memory from allocate. kPrivate: scratch and rings. kTcp: sockets between every pair.
// kMixed: ranks 0-1, 2-3, ... share memory, other pairs use sockets.
enum class Path { kDirect, kPrivate, kTcp, kMixed };

inline std::string name(Path path) {
  switch (path) {
    case Path::kDirect:
      return "direct";
    case Path::kPrivate:
      return "private";
    case Path::kTcp:
      return "tcp";
    case Path::kMixed:
      return "mixed";
  }
  return "";
}

// One thread for each element. Rethrows the first exception.
inline void run_each(std::size_t count, const std::function<void(std::size_t)>& run) {
  std::vector<std::exception_ptr> errors(count);
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < count; ++i) {
      threads.emplace_back([&, i] {
        try {
          run(i);
        } catch (...) {
          errors[i] = std::current_exception();
        }
      });
    }
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

struct WorldShape {
  int size = 1;
  Path path = Path::kDirect;
  std::chrono::milliseconds timeout{20'000};
  Stage stage{};
};

inline std::vector<Communicator> make_worlds(const WorldShape& shape) {
  const auto transport = shape.path == Path::kTcp ? TransportChoice::kTcp : TransportChoice::kAuto;
  auto controls = comm::in_process_control(shape.size, shape.timeout);
  Stage stage = shape.stage;
  if (shape.path == Path::kMixed) stage.ranks_per_host = 2;
  std::vector<Communicator> worlds(controls.size());
  run_each(worlds.size(), [&](std::size_t r) {
    worlds[r] = comm::host_world(std::make_shared<StageControl>(controls[r], stage), transport);
  });
  return worlds;
}

inline void run_world(const WorldShape& shape, const std::function<void(Communicator&)>& run) {
  auto worlds = make_worlds(shape);
  run_each(worlds.size(), [&](std::size_t r) { run(worlds[r]); });
}

// Memory of one rank, of the kind that the path tests.
class Memory {
 public:
  Memory(Communicator& group, Path path, std::int64_t count, Dtype dtype) {
    if (path == Path::kDirect) {
      shared_ = group.allocate(count, dtype);
      view_ = shared_.view();
    } else {
      private_.resize(static_cast<std::size_t>(count) + 1);  // never null
      view_ = {private_.data(), count, dtype};
    }
  }
  [[nodiscard]] TensorView view() const { return view_; }

 private:
  SharedMemory shared_;
  std::vector<std::uint64_t> private_;
  TensorView view_;
};

}  // namespace hsdp::test
