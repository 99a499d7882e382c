// Makes the world of the nccl engine: which rank uses which GPU, one version, one id.
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/host/host_wait.h"
#include "hsdp/comm/nccl/nccl_engine.h"
#include "hsdp/comm/optional_engines.h"
#include "hsdp/comm/rendezvous/host_identity.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/cuda_call.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

constexpr WaitState kConnect{.operation = "connect"};

// Numbers the worlds made over one control: each needs different names in the exchanges.
int count_world(const std::shared_ptr<Control>& control) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<Control>, int, std::owner_less<>> counts;
  const std::lock_guard lock(mutex);
  std::erase_if(counts, [](const auto& entry) { return entry.first.expired(); });
  return counts[control]++;
}

bool is_set(const char* variable) {
  const char* const text = std::getenv(variable);
  return text != nullptr && *text != 0 && std::string(text) != "0";
}

// What each rank sends to the others before NCCL is involved. One line each.
struct Seat {
  std::string fault;  // why this rank cannot take part
  std::string version;
  std::string gpu;     // with its host
  std::string device;  // its name in this process
  std::string id;      // of rank 0: bytes

  [[nodiscard]] std::string encode() const {
    return fault + '\n' + version + '\n' + gpu + '\n' + device + '\n' + id;
  }
  [[nodiscard]] static Seat decode(const std::string& text) {
    Seat seat;
    std::size_t begin = 0;
    for (std::string* line : {&seat.fault, &seat.version, &seat.gpu, &seat.device}) {
      const std::size_t end = text.find('\n', begin);
      if (end == std::string::npos) return seat;
      *line = text.substr(begin, end - begin);
      begin = end + 1;
    }
    seat.id = text.substr(begin);
    return seat;
  }
};

// Empty if the environment allows several ranks to share a GPU.
std::string gpu_name(Device device) {
  if (is_set("NCCL_HOSTID") || is_set("NCCL_MULTI_RANK_GPU_ENABLE")) return {};
  return host_identity() + " " + cuda_bus_id(device);
}

Seat take_seat(NcclWorld& world) {
  Seat seat;
  try {
    require_cuda(world.device);
    static_cast<void>(Buffer(world.device, 1));  // a context can be made there and has memory
    // First of all: this may set an environment variable, once, and ranks may be threads.
    if (world.control->size() > 1) world.library = NcclLibrary::shared();
    seat.gpu = gpu_name(world.device);
    seat.device = to_string(world.device);
    if (world.library != nullptr) {
      seat.version = world.library->version();
      if (world.control->rank() == 0) seat.id = world.library->new_id();
    }
  } catch (const Error& error) {
    seat.fault = error.what();
    for (char& c : seat.fault) c = c == '\n' ? ' ' : c;
  }
  return seat;
}

std::string of_size(std::size_t rank, std::size_t size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size);
}

void check_faults(const std::vector<Seat>& seats, const Seat& own) {
  if (!own.fault.empty()) throw UsageError(own.fault);
  for (std::size_t r = 0; r < seats.size(); ++r) {
    if (seats[r].fault.empty()) continue;
    throw MismatchError(
        "nccl: " + of_size(r, seats.size()) + " cannot take part: " + seats[r].fault,
        {static_cast<int>(r)});
  }
}

void check_versions(const std::vector<Seat>& seats) {
  for (std::size_t r = 1; r < seats.size(); ++r) {
    if (seats[r].version == seats[0].version) continue;
    throw MismatchError({.where = "nccl",
                         .expected = "version " + seats[0].version + " on every rank",
                         .got = seats[r].version + " on " + of_size(r, seats.size()),
                         .remedy = "use one libnccl on every rank, HSDP_NCCL_LIBRARY names it"},
                        {static_cast<int>(r)});
  }
}

void check_gpus(const std::vector<Seat>& seats) {
  std::map<std::string, std::size_t> taken;
  for (std::size_t r = 0; r < seats.size(); ++r) {
    if (seats[r].gpu.empty()) continue;
    const auto [place, free] = taken.emplace(seats[r].gpu, r);
    if (free) continue;
    throw UsageError("nccl: more ranks than GPUs: expected a GPU for each rank, got " +
                     seats[r].device + " of one host for ranks " + std::to_string(place->second) +
                     " and " + std::to_string(r) + " of " + std::to_string(seats.size()) +
                     "; pass the device of the rank's LOCAL_RANK, or set NCCL_HOSTID to a value of "
                     "its own on each rank to share a GPU (for tests; it is slow)");
  }
}

}  // namespace

void require_nccl() {}

Communicator nccl_world(const std::shared_ptr<Control>& control, Device device) {
  if (device.type != DeviceType::kCuda) {
    throw UsageError("engine: nccl: expected a CUDA device, got " + to_string(device) +
                     "; pass device cuda:LOCAL_RANK, or use engine 'host'");
  }
  std::vector<int> members(static_cast<std::size_t>(control->size()));
  std::iota(members.begin(), members.end(), 0);
  std::string id = "nccl" + std::to_string(count_world(control));
  auto world = std::make_shared<NcclWorld>();
  world->control = control;
  world->device = device;
  const Seat own = take_seat(*world);
  std::vector<Seat> seats;
  for (const std::string& text : control->exchange(id + "/seats", members, own.encode(), kConnect))
    seats.push_back(Seat::decode(text));
  check_faults(seats, own);
  check_versions(seats);
  check_gpus(seats);
  std::unique_ptr<NcclLink> link;
  if (control->size() > 1) {
    world->watch = std::make_unique<NcclWatch>(control, world->library, device);
    try {
      link = std::make_unique<NcclLink>(world, control->size(), control->rank(), seats[0].id);
      static_cast<void>(control->exchange(id + "/connected", members, "", kConnect));
    } catch (const NcclError& error) {
      end_world(*control, nccl_failure(*control, error.remote(), error.what(), kConnect), kConnect);
    }
  }
  return Communicator(std::make_shared<NcclEngine>(std::make_unique<NcclGroup>(
      std::move(world), std::move(link), std::move(id), std::move(members))));
}

}  // namespace hsdp::comm
