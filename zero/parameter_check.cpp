#include "zero/parameter_check.h"

#include <sstream>

#include "hsdp/device/buffer.h"
#include "hsdp/device/stream.h"
#include "hsdp/kernels/digest.h"

namespace hsdp::zero {
namespace {

// By array, and that of all of them in a row.
std::vector<std::uint64_t> digests_of(const std::vector<NamedParameter>& parameters) {
  std::vector<std::uint64_t> sums(parameters.size());
  if (parameters.empty()) return sums;
  const Device device = parameters.front().array.device;
  const Buffer pinned(device, sums.size() * sizeof(std::uint64_t), Buffer::Place::kPinnedHost);
  auto* const words = reinterpret_cast<std::uint64_t*>(pinned.data());
  Stream stream = device.type == DeviceType::kHost ? Stream::inline_host()
                                                   : Stream::create(device, "hsdp-check");
  std::uint64_t place = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    words[i] = 0;
    kernels::add_digest(parameters[i].array, place, &words[i], stream);
    place += kernels::digest_places(parameters[i].array);
  }
  stream.synchronize();
  sums.assign(words, words + sums.size());
  return sums;
}

}  // namespace

void ParameterCheck::started(std::function<std::vector<NamedParameter>()> gathered) {
  const std::scoped_lock lock(mutex_);
  gathered_ = ++start_count_ % every_ == 0 ? std::move(gathered) : nullptr;
  word_.clear();
}

void ParameterCheck::forget() {
  const std::scoped_lock lock(mutex_);
  gathered_ = nullptr;
}

std::string ParameterCheck::remedy() const {
  return "look for a fault of memory, GPU or link, or for a rank that wrote to its parameters "
         "alone, and go on from a checkpoint of before that step";
}

std::string ParameterCheck::word() const {
  const std::scoped_lock lock(mutex_);
  if (!gathered_) return word_;
  const std::vector<NamedParameter> parameters = std::exchange(gathered_, nullptr)();
  std::uint64_t whole = 0;
  std::ostringstream details;
  details << std::hex;
  const std::vector<std::uint64_t> sums = digests_of(parameters);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    whole += sums[i];
    details << parameters[i].name << " of digest " << sums[i] << '\n';
  }
  details_ = details.str();
  word_ = "#" + std::to_string(whole);
  return word_;
}

std::string ParameterCheck::details(const std::string& word) const {
  const std::scoped_lock lock(mutex_);
  return word == word_ ? details_ : std::string();
}

}  // namespace hsdp::zero
