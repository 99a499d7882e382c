// How a process gets its world: by a rendezvous with its peers, or with threads as ranks.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/control.h"
#include "hsdp/comm/rendezvous/launch_environment.h"

namespace hsdp {

// kAuto: shared memory between ranks that can pass descriptors, otherwise TCP. kTcp forces TCP for
// every pair (tests, benchmarks; HSDP_TRANSPORT=tcp does the same).
enum class TransportChoice { kAuto, kTcp };

struct WorldOptions {
  std::string engine = "auto";  // auto | host | nccl | mpi
  Device device{};
  std::chrono::milliseconds timeout{300'000};  // 1 ms to 1e6 s
  TransportChoice transport = TransportChoice::kAuto;
  std::optional<comm::LaunchEnvironment> launch{};  // default: detect_launch()
};

// The world of this process's job. Collective over the job. On each rank, a world closes with its
// last user. If the previous world is still open on every rank, a later call shares its connections
// and their timeout. Otherwise, as after a failure, all ranks meet again, and some may still use
// the previous world. Throws what fails during the call.
[[nodiscard]] Communicator connect_world(const WorldOptions& options = {});

// `size` ranks as threads of this process: element r is rank r's world. For tests and examples.
[[nodiscard]] std::vector<Communicator> in_process_world(int size,
                                                         const WorldOptions& options = {});

namespace comm {
// Rendezvous and control connection of this process (rank 0 relays).
[[nodiscard]] std::shared_ptr<Control> connect_control(const LaunchEnvironment& launch,
                                                       std::chrono::milliseconds timeout);
// Control for `size` threads of this process.
[[nodiscard]] std::vector<std::shared_ptr<Control>> in_process_control(
    int size, std::chrono::milliseconds timeout);
// The host engine over the whole world of `control`.
[[nodiscard]] Communicator host_world(std::shared_ptr<Control> control, TransportChoice transport);
}  // namespace comm

}  // namespace hsdp
