// Checks that all ranks of the mesh hold the same parameters after each `every`th gather of all of
// them, for the option verify_every [Note: parameters that are compared].
//
// A party of the Reducer's steps. Until the next gather its section of the status word is the
// digest of the gathered parameters; if ranks have different ones, the world ends. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "hsdp/device/stream.h"
#include "hsdp/reducer/digest_comparison.h"
#include "hsdp/step_party.h"
#include "hsdp/tensor_view.h"

namespace hsdp::zero {

class ParameterCheck final : public StepParty {
 public:
  ParameterCheck(std::int64_t every, Device device, std::vector<std::string> names);

  // A gather of all parameters begins. Returns whether it is compared: then its tasks add() each
  // parameter, and `wait` returns when they, and on a GPU the device, have done so.
  bool start(std::function<void()> wait);
  void add(std::size_t parameter, ConstTensorView array, const Stream& stream);
  // Never calls `wait` again.
  void forget();

  [[nodiscard]] std::string owner() const override { return "parameters after their gather"; }
  [[nodiscard]] std::string remedy() const override;
  [[nodiscard]] std::string word() const override;
  [[nodiscard]] std::string details(const std::string& word) const override;
  [[nodiscard]] bool has_state() const override { return false; }

 private:
  const std::int64_t every_;
  const std::vector<std::string> names_;
  reducer::Digests digests_;  // of each parameter
  mutable std::mutex mutex_;
  std::int64_t start_count_ = 0;
  mutable std::function<void()> wait_;  // empty: nothing to wait for
  mutable std::string word_;            // of the last gather, if it was compared
};

}  // namespace hsdp::zero
