#include "zero/parameter_check.h"

#include <sstream>
#include <utility>

#include "hsdp/kernels/digest.h"

namespace hsdp::zero {

ParameterCheck::ParameterCheck(std::int64_t every, Device device, std::vector<std::string> names)
    : every_(every), names_(std::move(names)), digests_(device, names_.size()) {}

bool ParameterCheck::start(std::function<void()> wait) {
  const std::scoped_lock lock(mutex_);
  word_.clear();
  wait_ = nullptr;
  if (++start_count_ % every_ != 0) return false;
  digests_.clear();  // parameters without elements add nothing
  wait_ = std::move(wait);
  return true;
}

void ParameterCheck::add(std::size_t parameter, ConstTensorView array, const Stream& stream) {
  kernels::add_digest(array, 0, digests_.at(parameter), stream);
}

void ParameterCheck::forget() {
  const std::scoped_lock lock(mutex_);
  wait_ = nullptr;
}

std::string ParameterCheck::remedy() const { return reducer::kDifferenceRemedy; }

std::string ParameterCheck::word() const {
  const std::scoped_lock lock(mutex_);
  if (!wait_) return word_;
  wait_();
  word_ = "#" + std::to_string(digests_.together(0, names_.size()));
  wait_ = nullptr;
  return word_;
}

std::string ParameterCheck::details(const std::string& word) const {
  const std::scoped_lock lock(mutex_);
  if (word != word_) return {};
  std::ostringstream details;
  details << std::hex;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    details << names_[i] << " of digest " << *digests_.at(i) << '\n';
  }
  return details.str();
}

}  // namespace hsdp::zero
