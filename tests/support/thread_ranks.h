// Runs a function on every rank of an in-process world, each rank a thread.
//
// A rank whose function throws ends the world, so that its peers do not wait for it. When the
// deadline passes, the world is ended too; if a rank still does not come back, the process aborts
// and says which: a test never hangs.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/comm/world.h"
#include "hsdp/mesh.h"

namespace hsdp::test {

struct ThreadRanksOptions {
  TransportChoice transport = TransportChoice::kAuto;
  std::chrono::milliseconds timeout{30'000};  // of the world
#if defined(__SANITIZE_THREAD__)
  std::chrono::seconds deadline{300};  // what takes a second takes half a minute there
#else
  std::chrono::seconds deadline{120};
#endif
};

// The timeout is longer than the test may take, so no error comes from it.
inline constexpr ThreadRanksOptions kPatient{.timeout = std::chrono::minutes(2),
                                             .deadline = std::chrono::seconds(60)};

using RankBody = std::function<void(Communicator& world)>;
using MeshBody = std::function<void(const Mesh& mesh)>;

// The exception that left each rank's function, if any.
[[nodiscard]] std::vector<std::exception_ptr> try_ranks(int size, const RankBody& body,
                                                        const ThreadRanksOptions& options = {});

// As above; every exception is a test failure.
void run_ranks(int size, const RankBody& body, const ThreadRanksOptions& options = {});

struct MeshShape {
  int replicate = 1;
  int shard = 1;
  [[nodiscard]] int size() const { return replicate * shard; }
};
inline constexpr MeshShape kSquare{.replicate = 2, .shard = 2};

[[nodiscard]] std::string to_string(MeshShape shape);  // "2x3"
void PrintTo(MeshShape shape, std::ostream* out);      // for GoogleTest

// run_ranks with a mesh over the whole world.
void run_mesh(MeshShape shape, const MeshBody& body, const ThreadRanksOptions& options = {});
inline void run_patiently(MeshShape shape, const MeshBody& body) {
  run_mesh(shape, body, kPatient);
}

// An idle machine keeps the promise of two seconds. On an overloaded one, with a load of several
// times its cores, every step on the way waits for its turn; hence more.
[[nodiscard]] std::chrono::milliseconds within_two_seconds();

// Returns the exception of type E that `function` throws; none when it returns. Other exceptions
// pass through.
template <typename E, typename Function>
[[nodiscard]] std::optional<E> caught(Function&& function) {
  try {
    function();
  } catch (const E& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace hsdp::test
