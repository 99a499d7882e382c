// A world of ranks divided into replicate x shard: rank = replica * shard_size + shard_rank
// [Note: mesh order].
//
// Shard groups are contiguous ranks (one node); replicate groups are strided (across nodes). A Mesh
// is a cheap handle to shared state; copies share it. close() ends it on this rank: asking for its
// groups then throws UsageError, while existing groups and Reducers stay usable.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/world.h"

namespace hsdp {

struct MeshOptions {
  int replicate = 1;
  int shard = 1;
  std::string engine = "auto";
  Device device{};
  // For several meshes in one job: ranks[replica][shard] are job ranks, and each process passes the
  // array that holds its rank. Empty: all ranks of the job in order.
  std::vector<std::vector<int>> ranks{};
  double timeout_s = 300.0;  // 0.001 to 1e6; ignored if the world is already open
  TransportChoice transport = TransportChoice::kAuto;
};

class Mesh {
 public:
  // Collective over `job`. Throws UsageError if the sizes do not multiply to the world, or if ranks
  // are out of range, repeated, or lack this rank; MismatchError if the ranks disagree.
  Mesh(const Communicator& job, const MeshOptions& options);

  [[nodiscard]] int rank() const;  // in the mesh's world
  [[nodiscard]] int size() const;
  [[nodiscard]] int replica() const;
  [[nodiscard]] int shard_rank() const;
  [[nodiscard]] int replicate_size() const;
  [[nodiscard]] int shard_size() const;
  [[nodiscard]] double timeout_s() const;  // of waits in its world
  [[nodiscard]] Device device() const;

  [[nodiscard]] Communicator& world() const;
  [[nodiscard]] Communicator& shard_group() const;
  [[nodiscard]] Communicator& replicate_group() const;

  void close();
  [[nodiscard]] bool closed() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  [[nodiscard]] State& state() const;  // throws UsageError after close()
};

// Connects this process to its job and makes a mesh over it. Collective over the job.
[[nodiscard]] Mesh init_mesh(const MeshOptions& options);

}  // namespace hsdp
