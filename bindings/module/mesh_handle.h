// A Mesh for Python: every use first checks that it is in its own process and open.
#pragma once

#include <memory>
#include <string>

#include "bindings/module/caller_stream.h"
#include "bindings/module/interruptible_call.h"
#include "bindings/module/own_process.h"
#include "hsdp/mesh.h"

namespace hsdp::python {

class MeshHandle {
 public:
  explicit MeshHandle(const Mesh& mesh)
      : mesh_(make_owned_by_process(mesh)),
        caller_(std::make_shared<CallerStream>(mesh.device())) {}

  // Throws UsageError in a forked child.
  [[nodiscard]] Mesh& mesh() const {
    process_.require("mesh");
    return *mesh_;
  }
  // Where its users' work on its device runs; shared with its groups and Reducers.
  [[nodiscard]] const std::shared_ptr<CallerStream>& caller() const { return caller_; }
  // Ends the world of this mesh on every rank.
  [[nodiscard]] Interrupt interrupt() const {
    return [world = mesh().world()](const std::string& reason) mutable { world.abort(reason); };
  }

 private:
  OwnProcess process_;
  std::shared_ptr<Mesh> mesh_;
  std::shared_ptr<CallerStream> caller_;
};

// Which of a mesh's groups a communicator is.
enum class GroupKind : std::uint8_t { kWorld, kShard, kReplicate };

class CommunicatorHandle {
 public:
  CommunicatorHandle(MeshHandle mesh, GroupKind kind) : mesh_(std::move(mesh)), kind_(kind) {}

  [[nodiscard]] const MeshHandle& mesh() const { return mesh_; }
  // Throws UsageError if the mesh is closed or this is a forked child.
  [[nodiscard]] Communicator& group() const;

 private:
  MeshHandle mesh_;
  GroupKind kind_;
};

}  // namespace hsdp::python
