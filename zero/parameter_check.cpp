#include "zero/parameter_check.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "hsdp/kernels/digest.h"

namespace hsdp::zero {

ParameterCheck::ParameterCheck(std::int64_t every, Device device, std::vector<std::string> names)
    : every_(every),
      names_(std::move(names)),
      sums_(device, names_.size() * sizeof(std::uint64_t), Buffer::Place::kPinnedHost) {}

bool ParameterCheck::start(std::function<void()> wait) {
  const std::scoped_lock lock(mutex_);
  word_.clear();
  wait_ = nullptr;
  if (++start_count_ % every_ != 0) return false;
  std::fill_n(sums(), names_.size(), 0);  // parameters without elements add nothing
  wait_ = std::move(wait);
  return true;
}

void ParameterCheck::add(std::size_t parameter, ConstTensorView array, const Stream& stream) {
  kernels::add_digest(array, 0, sums() + parameter, stream);
}

void ParameterCheck::forget() {
  const std::scoped_lock lock(mutex_);
  wait_ = nullptr;
}

std::string ParameterCheck::remedy() const {
  return "look for a fault of memory, GPU or link, and go on from a checkpoint of before that step";
}

std::string ParameterCheck::word() const {
  const std::scoped_lock lock(mutex_);
  if (!wait_) return word_;
  wait_();
  std::uint64_t whole = 0;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15U;  // so that each parameter's bits count
    whole = whole * kOdd + sums()[i];
  }
  word_ = "#" + std::to_string(whole);
  wait_ = nullptr;
  return word_;
}

std::string ParameterCheck::details(const std::string& word) const {
  const std::scoped_lock lock(mutex_);
  if (word != word_) return {};
  std::ostringstream details;
  details << std::hex;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    details << names_[i] << " of digest " << sums()[i] << '\n';
  }
  return details.str();
}

}  // namespace hsdp::zero
