// Whether all ranks of the mesh hold the same parameters after each `every`th gather of all of
// them, as Reducer's verify_every asks [Note: parameters that are compared].
//
// A party of the Reducer's steps: the digest of the parameters is its word in the first microbatch
// after the gather, which ends the world on every rank where one has another. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/step_party.h"
#include "hsdp/tensor_view.h"

namespace hsdp::zero {

struct NamedParameter {
  std::string name{};
  ConstTensorView array{};
};

class ParameterCheck final : public StepParty {
 public:
  explicit ParameterCheck(std::int64_t every) : every_(every) {}

  // A gather of all of them was started. What `gathered` returns stays valid and unchanged until
  // the word was said, or forget(); it may block until they are complete.
  void started(std::function<std::vector<NamedParameter>()> gathered);
  // Nothing is compared before the next gather.
  void forget();

  [[nodiscard]] std::string owner() const override { return "parameters after their gather"; }
  [[nodiscard]] std::string remedy() const override;
  [[nodiscard]] std::string word() const override;
  [[nodiscard]] std::string details(const std::string& word) const override;
  [[nodiscard]] bool has_state() const override { return false; }

 private:
  const std::int64_t every_;
  mutable std::mutex mutex_;
  std::int64_t start_count_ = 0;
  mutable std::function<std::vector<NamedParameter>()> gathered_;  // none: nothing to compare
  mutable std::string word_;                                       // of the last gather compared
  mutable std::string details_;
};

}  // namespace hsdp::zero
