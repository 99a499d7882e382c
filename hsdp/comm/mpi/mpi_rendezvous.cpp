// Uses MPI to carry what ranks on several hosts need to meet: an address of rank 0 that all can
// reach, and a secret made for this job [Note: MPI carries the address].
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/mpi/address_probe.h"
#include "hsdp/comm/mpi/mpi_library.h"
#include "hsdp/comm/mpi/mpi_link.h"
#include "hsdp/comm/optional_engines.h"
#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/comm/rendezvous/host_identity.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kAddresses = 8;
constexpr std::size_t kSecretBytes = 64;
constexpr std::size_t kAddressBytes = 46;  // INET6_ADDRSTRLEN

// What every rank sends to all: plain data of one size.
struct Introduction {
  std::uint64_t host = 0;
  std::int32_t port = 0;  // rank 0's, like the following fields
  std::array<char, kSecretBytes + 1> secret{};
  std::array<std::array<char, kAddressBytes>, kAddresses> addresses{};
};

class MpiMeeting {
 public:
  MpiMeeting(const LaunchEnvironment& launch, std::chrono::milliseconds timeout)
      : launch_(launch), timeout_(timeout), end_(Clock::now() + timeout) {
    await([this] { return link_.is_open(); });
  }

  template <typename T>
  std::vector<T> gather(const T& mine) {
    std::vector<std::byte> bytes(sizeof(T));
    std::memcpy(bytes.data(), &mine, sizeof(T));
    link_.start_gather(std::move(bytes));
    await([this] { return link_.is_gathered(); });
    std::vector<T> all(link_.gathered().size() / sizeof(T));
    std::memcpy(all.data(), link_.gathered().data(), link_.gathered().size());
    return all;
  }

 private:
  // There is no control connection yet: only the deadline ends this.
  void await(const std::function<bool()>& ready) const {
    while (!ready()) {
      if (Clock::now() > end_) {
        worsen_mpi_exit(MpiExit::kLeave);
        throw TimeoutError("rendezvous: the ranks did not meet over MPI within " +
                               seconds_text(timeout_) + " (rank " + std::to_string(launch_.rank) +
                               " of " + std::to_string(launch_.size) +
                               "); call init_mesh on every rank with the same arguments",
                           {});
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  const LaunchEnvironment& launch_;
  std::chrono::milliseconds timeout_;
  Clock::time_point end_;
  MpiLink link_;
};

void set_text(std::span<char> place, const std::string& text) {
  std::copy_n(text.begin(), std::min(text.size(), place.size() - 1), place.begin());
}

bool lacks_meeting_point(const LaunchEnvironment& launch) {
  return !launch.one_host() && (!launch.address || !launch.secret);
}

// Only MPI's own launchers: under others, a process may not be an MPI rank.
bool is_mpi_launch(const LaunchEnvironment& launch) {
  return launch.family == LaunchFamily::kOpenMpi || launch.family == LaunchFamily::kPmi;
}

// Chooses the address that all ranks can reach; all see the same answers and choose the same one.
void choose_address(const Introduction& hub, MpiMeeting& meeting, LaunchEnvironment& launch) {
  std::uint32_t reached = 0;
  for (std::size_t i = 0; i < kAddresses; ++i) {
    const std::string address = hub.addresses[i].data();
    if (!address.empty() && reaches(address, hub.port)) reached |= 1U << i;
  }
  std::uint32_t by_all = ~0U;
  for (const std::uint32_t one : meeting.gather(reached)) by_all &= one;
  if (by_all == 0) {
    throw UsageError(
        "rendezvous: no address of rank 0's host can be reached by all ranks; set HSDP_ADDR, "
        "HSDP_PORT and HSDP_SECRET on every rank");
  }
  launch.address = hub.addresses[static_cast<std::size_t>(std::countr_zero(by_all))].data();
  launch.port = hub.port;
}

}  // namespace

LaunchEnvironment meet_over_mpi(LaunchEnvironment launch, bool is_engine,
                                std::chrono::milliseconds timeout) {
  const bool knows_hosts = launch.local_size.has_value() || launch.address.has_value();
  const bool is_needed = is_engine ? !knows_hosts || lacks_meeting_point(launch)
                                   : is_mpi_launch(launch) && lacks_meeting_point(launch);
  if (launch.size == 1 || !is_needed) return launch;
  open_mpi();
  // Under another MPI's mpirun, let the host engine report which settings it lacks.
  if (!is_engine && mpi_place().size == 1) return launch;
  require_mpi_place(launch.rank, launch.size);
  MpiMeeting meeting(launch, timeout);
  Introduction mine{.host = std::hash<std::string>()(host_identity())};
  AddressProbe probe;  // rank 0 listens while the others try
  if (launch.rank == 0) {
    probe.open();
    mine.port = probe.port();
    set_text(mine.secret, random_secret());
    const auto addresses = own_addresses(kAddresses);
    for (std::size_t i = 0; i < addresses.size(); ++i) set_text(mine.addresses[i], addresses[i]);
  }
  const auto all = meeting.gather(mine);
  if (!knows_hosts) {
    launch.local_size = static_cast<int>(
        std::ranges::count_if(all, [&](const auto& rank) { return rank.host == mine.host; }));
  }
  if (!launch.one_host() && !launch.address) choose_address(all.front(), meeting, launch);
  if (!launch.secret) launch.secret = all.front().secret.data();
  return launch;
}

}  // namespace hsdp::comm
