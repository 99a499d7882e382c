#include "tests/mpi/mpi_ranks.h"

#include <gtest/gtest.h>

#include "hsdp/comm/rendezvous/launch_environment.h"

namespace hsdp::test {
namespace {

// One world at a time: the next one connects anew.
Communicator& lasting_world() {
  static Communicator world;
  return world;
}

// Prints only failures, with the rank; rank 0 prints everything.
class QuietRank : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::printf("rank %d: %s:%d: %s\n", comm::detect_launch().rank,
                result.file_name() == nullptr ? "" : result.file_name(), result.line_number(),
                result.message());
  }
};

}  // namespace

int launched_size() {
  static const int size = comm::detect_launch().size;
  return size;
}

Communicator fresh_world(const std::string& engine, std::chrono::milliseconds timeout) {
  lasting_world() = {};
  return connect_world({.engine = engine, .timeout = timeout});
}

void run_in_group(const std::string& engine, const std::function<void(Communicator&)>& body) {
  Communicator& world = lasting_world();
  if (!world || world.engine_name() != engine) {
    // Connected before the other one closes, so that both share the connections.
    world = connect_world({.engine = engine});
  }
  Communicator group = world.split(0, world.rank());
  body(group);
}

}  // namespace hsdp::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (hsdp::comm::detect_launch().rank != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new hsdp::test::QuietRank);
  }
  const int status = RUN_ALL_TESTS();
  static_cast<void>(
      hsdp::test::fresh_world("host"));  // ranks leave together: none ends while another tests
  return status;
}
