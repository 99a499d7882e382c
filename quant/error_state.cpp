#include "quant/error_state.h"

#include "hsdp/kernels/cast_and_pack.h"

namespace hsdp::quant {
namespace {

// A window's errors begin at multiples of this, so that they can be cleared in words.
constexpr std::int64_t kPlaceElements = 64;

std::int64_t error_bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 1; }

void clear_bytes(std::byte* data, std::int64_t bytes, const Stream& stream) {
  kernels::CastAndPack args;  // without a gradient: packs zeros
  args.count = bytes / 4;
  args.out = data;
  kernels::cast_and_pack(args, stream);
}

}  // namespace

std::int64_t ErrorStates::bytes(Dtype dtype, const std::vector<Extent>& windows) {
  std::int64_t bytes = 0;
  for (const Extent& window : windows) {
    bytes += error_bytes(dtype) * padded(window.elements, kPlaceElements);
    if (dtype != Dtype::kF32) bytes += 4 * window.groups;
  }
  return bytes;
}

ErrorStates::ErrorStates(Dtype dtype, const std::vector<Extent>& windows, Device device)
    : dtype_(dtype) {
  std::int64_t elements = 0;
  std::int64_t groups = 0;
  for (const Extent& window : windows) {
    places_.push_back({.element = elements, .group = groups, .extent = window});
    elements += padded(window.elements, kPlaceElements);
    groups += window.groups;
  }
  for (int bank = 0; bank < 2; ++bank) {
    errors_[bank] = Buffer(device, static_cast<std::size_t>(error_bytes(dtype) * elements));
    if (dtype != Dtype::kF32) {
      scales_[bank] = Buffer(device, static_cast<std::size_t>(4 * groups));
    }
  }
}

ErrorState ErrorStates::at(const Place& place, std::size_t bank) const {
  std::byte* const errors = errors_[bank].data();
  if (dtype_ == Dtype::kF32) {
    return {.values = reinterpret_cast<float*>(errors) + place.element};
  }
  return {.codes = reinterpret_cast<std::int8_t*>(errors) + place.element,
          .scales = reinterpret_cast<float*>(scales_[bank].data()) + place.group};
}

void ErrorStates::clear(const Place& place, std::size_t bank, const Stream& stream) const {
  const ErrorState state = at(place, bank);
  auto* const errors = state.values != nullptr ? reinterpret_cast<std::byte*>(state.values)
                                               : reinterpret_cast<std::byte*>(state.codes);
  clear_bytes(errors, error_bytes(dtype_) * padded(place.extent.elements, kPlaceElements), stream);
  if (state.scales != nullptr) {
    clear_bytes(reinterpret_cast<std::byte*>(state.scales), 4 * place.extent.groups, stream);
  }
}

ErrorStates::Step ErrorStates::next(std::size_t window, bool cleared, const Stream& stream) {
  Place& place = places_[window];
  const std::size_t other = 1U - place.bank;
  const ErrorState after = at(place, other);
  if (place.written) return {after, after};
  place.written = true;
  if (!cleared) return {at(place, place.bank), after};
  clear(place, other, stream);
  return {after, after};
}

void ErrorStates::commit() {
  for (Place& place : places_) {
    if (place.written) place.bank ^= 1U;
    place.written = false;
  }
}

void ErrorStates::drop() {
  for (Place& place : places_) place.written = false;
}

ErrorState ErrorStates::state(std::size_t window) const {
  return at(places_[window], places_[window].bank);
}

void ErrorStates::clear_unwritten(const Stream& stream) {
  for (const Place& place : places_) {
    if (!place.written) clear(place, place.bank, stream);
  }
}

}  // namespace hsdp::quant
