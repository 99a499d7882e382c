// A world of ranks cut into replicate x shard: rank = replica * shard_size + shard_rank
// [Note: mesh order].
//
// Shard groups are contiguous ranks (one node), replicate groups are strided (across nodes). A Mesh
// is a cheap handle on shared state; copies share it. close() ends it on this rank: its groups are
// UsageErrors after that, while what was made of them before, Reducers too, stays usable.
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
  // Several meshes in one job: ranks[replica][shard] are job ranks; each process passes the array
  // that holds its own rank. Empty: all ranks of the job in order.
  std::vector<std::vector<int>> ranks{};
  double timeout_s = 300.0;  // 0.001 to 1e6; of a world that is open already its own counts
  TransportChoice transport = TransportChoice::kAuto;
};

class Mesh {
 public:
  // Collective over `job`. UsageError when the sizes do not multiply to the world, when ranks are
  // out of range, twice, or do not hold this rank; MismatchError when the ranks disagree.
  Mesh(const Communicator& job, const MeshOptions& options);

  [[nodiscard]] int rank() const;  // in the mesh's world
  [[nodiscard]] int size() const;
  [[nodiscard]] int replica() const;
  [[nodiscard]] int shard_rank() const;
  [[nodiscard]] int replicate_size() const;
  [[nodiscard]] int shard_size() const;
  [[nodiscard]] double timeout_s() const;  // of its world's waits
  [[nodiscard]] Device device() const;

  [[nodiscard]] Communicator& world() const;
  [[nodiscard]] Communicator& shard_group() const;
  [[nodiscard]] Communicator& replicate_group() const;

  void close();
  [[nodiscard]] bool closed() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  [[nodiscard]] State& state() const;  // UsageError after close()
};

// Connects to the job of this process and makes a mesh over it. Collective over the job.
[[nodiscard]] Mesh init_mesh(const MeshOptions& options);

}  // namespace hsdp
