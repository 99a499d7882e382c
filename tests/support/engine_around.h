// An engine around another one, for stand-ins that change what collectives do. It describes itself
// as the inner engine does. The stand-in supplies the collectives, split() and allocate().
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "hsdp/comm/engine.h"

namespace hsdp::test {

class EngineAround : public Communicator::Engine {
 public:
  explicit EngineAround(std::shared_ptr<Communicator::Engine> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] const std::vector<int>& world_ranks() const override {
    return inner_->world_ranks();
  }
  [[nodiscard]] Transport transport() const override { return inner_->transport(); }
  [[nodiscard]] std::string_view name() const override { return inner_->name(); }
  [[nodiscard]] const std::string& group_id() const override { return inner_->group_id(); }
  [[nodiscard]] comm::Control& control() const override { return inner_->control(); }

 protected:
  [[nodiscard]] const std::shared_ptr<Communicator::Engine>& inner() const { return inner_; }

 private:
  std::shared_ptr<Communicator::Engine> inner_;
};

}  // namespace hsdp::test
