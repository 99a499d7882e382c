#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>

#include "hsdp/comm/host/host_engine.h"
#include "hsdp/comm/world.h"
#include "hsdp/error.h"

namespace hsdp {
namespace comm {
namespace {

// Numbers the worlds made over one control: each needs different names in the exchanges.
int count_world(const std::shared_ptr<Control>& control) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<Control>, int, std::owner_less<>> counts;
  const std::lock_guard lock(mutex);
  std::erase_if(counts, [](const auto& entry) { return entry.first.expired(); });
  return counts[control]++;
}

}  // namespace

Communicator host_world(std::shared_ptr<Control> control, TransportChoice transport) {
  std::vector<int> members(static_cast<std::size_t>(control->size()));
  std::iota(members.begin(), members.end(), 0);
  const std::string id = "host" + std::to_string(count_world(control));
  auto world = std::make_shared<HostWorld>();
  world->control = std::move(control);
  world->transport = transport;
  return Communicator(std::make_shared<HostEngine>(
      std::make_unique<HostGroup>(std::move(world), id, std::move(members))));
}

}  // namespace comm

std::vector<Communicator> in_process_world(int size, const WorldOptions& options) {
  if (options.engine != "auto" && options.engine != "host") {
    throw UsageError({.where = "in_process_world: engine",
                      .expected = "'auto' or 'host'",
                      .got = "'" + options.engine + "'",
                      .remedy = "ranks that are threads need the host engine"});
  }
  const auto controls = comm::in_process_control(size, options.timeout);
  std::vector<Communicator> worlds(controls.size());
  std::vector<std::exception_ptr> errors(controls.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < controls.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        worlds[rank] = comm::host_world(controls[rank], options.transport);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return worlds;
}

}  // namespace hsdp
