#include <vector>

#include "check.h"
#include "device_row.h"
#include "zero/adamw_kernels.h"

namespace hsdp::gpu {
namespace {

using zero::AdamWClock;
using zero::AdamWSlice;
using zero::AdamWTick;

// A slice on the device with separately aligned arrays, and the values that it must get.
struct DeviceSlice {
  DeviceSlice(std::int64_t count, std::mt19937& random, const Stream& stream) {
    for (int i = 0; i < 4; ++i) rows.emplace_back(Dtype::kF32, count, random() % 16, stream);
    for (DeviceRow& row : rows) row.fill(random);
    for (const DeviceRow& row : rows) {
      wanted.emplace_back(Dtype::kF32, count, 0, stream).copy_from(row);
    }
  }
  [[nodiscard]] AdamWSlice on_device() {
    const auto at = [this](std::size_t i) { return reinterpret_cast<float*>(rows[i].data()); };
    return {at(0), at(1), at(2), at(3), rows[0].count()};
  }
  [[nodiscard]] AdamWSlice on_host() {
    const auto at = [this](std::size_t i) { return reinterpret_cast<float*>(wanted[i].host()); };
    return {at(0), at(1), at(2), at(3), rows[0].count()};
  }
  [[nodiscard]] std::string difference() {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::string found = rows[i].difference(wanted[i]);
      if (!found.empty()) return "array " + std::to_string(i) + ": " + found;
    }
    return {};
  }

  std::vector<DeviceRow> rows;  // parameter, gradient, first, second
  std::vector<DeviceRow> wanted;
};

// Compares three updates, the second of which is skipped, with the scalar definition.
std::string check_updates(const std::vector<std::int64_t>& counts, const Stream& stream) {
  std::mt19937 random(1);
  std::vector<DeviceSlice> slices;
  std::vector<AdamWSlice> on_device;
  for (const std::int64_t count : counts) slices.emplace_back(count, random, stream);
  for (DeviceSlice& slice : slices) on_device.push_back(slice.on_device());
  const Buffer clock_memory(stream.device(), sizeof(AdamWClock));
  auto* const clock = reinterpret_cast<AdamWClock*>(clock_memory.data());
  const Buffer words(stream.device(), 2 * sizeof(float));
  auto* const word = reinterpret_cast<float*>(words.data());
  AdamWClock want;
  for (const float found_inf : {0.0F, 1.0F, 0.0F}) {
    const float values[] = {0.37F, found_inf};
    copy_bytes(word, values, sizeof(values), stream);
    Stream(stream).synchronize();
    AdamWTick tick{.options = {}, .grad_factor = word, .found_inf = word + 1, .clock = clock};
    zero::adamw_tick(tick, stream);
    zero::adamw_update(on_device, clock, stream);
    tick.grad_factor = values;
    tick.found_inf = values + 1;
    tick.clock = &want;
    zero::adamw_tick(tick, Stream::inline_host());
    if (want.numbers.skip != 0) continue;
    for (DeviceSlice& slice : slices) zero::adamw_reference(slice.on_host(), want.numbers);
  }
  AdamWClock got;
  copy_bytes(&got, clock, sizeof(got), stream);
  Stream(stream).synchronize();
  if (got.steps != 2 || got.beta1_power != want.beta1_power ||
      got.beta2_power != want.beta2_power || got.numbers.root != want.numbers.root ||
      got.numbers.rate != want.numbers.rate) {
    return "the clock is another";
  }
  for (DeviceSlice& slice : slices) {
    const std::string found = slice.difference();
    if (!found.empty()) return "a slice of " + std::to_string(slice.rows[0].count()) + ", " + found;
  }
  return {};
}

}  // namespace

std::vector<Check> adamw_checks(Effort effort) {
  const auto check = [](const std::vector<std::int64_t>& counts) {
    return [counts](const Stream& stream) { return check_updates(counts, stream); };
  };
  std::vector<std::int64_t> tails{1023, 1024, 1025, 0, 5000};  // too many slices for one kernel
  for (std::int64_t count = 0; count <= 70; ++count) tails.push_back(count);
  const std::int64_t largest = effort == Effort::kFull ? 40'000'007 : 300'007;
  return {
      {"AdamW: the bits of the host in every tail", check(tails)},
      {"AdamW: the bits of the host on a large slice", check({3, largest, 0, 1})},
      {"AdamW: nothing but empty slices", check({0, 0})},
  };
}

}  // namespace hsdp::gpu
