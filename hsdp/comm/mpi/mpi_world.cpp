// The MPI engine's group of all ranks.
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/mpi/mpi_engine.h"
#include "hsdp/comm/mpi/mpi_library.h"
#include "hsdp/comm/optional_engines.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

// Numbers the worlds made over one control: each needs different names in the exchanges.
int count_world(const std::shared_ptr<Control>& control) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<Control>, int, std::owner_less<>> counts;
  const std::lock_guard lock(mutex);
  std::erase_if(counts, [](const auto& entry) { return entry.first.expired(); });
  return counts[control]++;
}

std::vector<int> everyone(const Control& control) {
  std::vector<int> ranks(static_cast<std::size_t>(control.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Why this rank cannot take part; empty if it can.
std::string open_library(const Control& control) {
  try {
    open_mpi();
    require_mpi_place(control.rank(), control.size());
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// MPI_Init waits for all ranks and cannot be interrupted: no rank calls it before all are here. A
// rank that cannot take part says so, and no other rank waits for it inside MPI.
void open_everywhere(Control& control, const std::string& id) {
  static_cast<void>(control.exchange(id + "/start", everyone(control), "", {"init_mesh"}));
  const std::string fault = open_library(control);
  const auto all = control.exchange(id + "/open", everyone(control), fault, {"init_mesh"});
  if (!fault.empty()) throw UsageError(fault);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    throw MismatchError("mpi: rank " + std::to_string(r) + " of " + std::to_string(all.size()) +
                            " cannot use MPI: " + all[r],
                        {static_cast<int>(r)});
  }
}

void await_open(Control& control, MpiLink& link) {
  Bell bell{};
  PollingWaiter waiter(bell);
  wait_until(
      control, waiter, {.operation = "MPI_Comm_idup"}, [&] { return link.is_open(); },
      [] { return -1; });
}

}  // namespace

void require_mpi() {}

Communicator mpi_world(const std::shared_ptr<Control>& control) {
  const std::string id = "mpi" + std::to_string(count_world(control));
  auto world = std::make_shared<MpiWorld>();
  world->control = control;
  if (control->size() > 1) {  // a single rank needs no MPI
    open_everywhere(*control, id);
    world->failure_watch = control->on_failure([] { worsen_mpi_exit(MpiExit::kBounded); });
    world->link = std::make_shared<MpiLink>();
    await_open(*control, *world->link);
    world->progress = std::make_unique<MpiProgress>(world->link);
  }
  constexpr int kWorldTag = 0;
  return Communicator(std::make_shared<MpiEngine>(std::make_unique<MpiGroup>(
      std::move(world),
      MpiGroup::Place{.id = id, .members = everyone(*control), .tag = kWorldTag})));
}

}  // namespace hsdp::comm
