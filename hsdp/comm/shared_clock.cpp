#include "hsdp/comm/shared_clock.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

namespace hsdp::comm {
namespace {

constexpr std::string_view kAct = "compare clocks";
constexpr std::size_t kRounds = 16;
constexpr double kNanosecond = 1e-9;

}  // namespace

ClockOffset measure_clock(Communicator& group, const std::string& key,
                          const std::function<double()>& now_s) {
  std::array<double, kRounds> said{};
  std::array<double, kRounds> heard{};
  for (std::size_t i = 0; i < kRounds; ++i) {
    const std::string round = key + "/" + std::to_string(i);
    said[i] = now_s();
    group.post(round, {});
    static_cast<void>(group.collect(round, kAct));
    heard[i] = now_s();
  }
  // A sum to which the first rank alone adds is what it says.
  std::vector<std::int64_t> own;
  if (group.rank() == 0) {
    for (const auto& times : {said, heard}) {
      for (const double time : times) own.push_back(std::llround(time / kNanosecond));
    }
  }
  group.post(key, {.sum = own});
  const Agreement agreed = group.collect(key, kAct);
  if (group.rank() == 0) return {};
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < kRounds; ++i) {
    const double first_said = static_cast<double>(agreed.sum.at(i)) * kNanosecond;
    const double first_heard = static_cast<double>(agreed.sum.at(kRounds + i)) * kNanosecond;
    least = std::max(least, first_said - heard[i]);
    most = std::min(most, first_heard - said[i]);
  }
  const double drift_s = kMostDrift * (heard.back() - said.front());
  return {(least + most) / 2, std::abs(most - least) / 2 + drift_s + kNanosecond};
}

}  // namespace hsdp::comm
