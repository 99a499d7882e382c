// Compares digests of values that should be the same on several ranks: all at once in a short
// message, and only if one differs each by itself, to name the ranks in the minority [Note: results
// that are compared].
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/buffer.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/step_agreement.h"

namespace hsdp::reducer {

// Digests in memory that kernels of the device add to.
class Digests {
 public:
  Digests() = default;
  Digests(Device device, std::size_t count);
  void clear();
  [[nodiscard]] std::uint64_t* at(std::size_t i) const {
    return reinterpret_cast<std::uint64_t*>(memory_.data()) + i;
  }
  [[nodiscard]] std::size_t count() const { return memory_.size() / sizeof(std::uint64_t); }
  // One digest of `count` of them, in their order.
  [[nodiscard]] std::uint64_t together(std::size_t first, std::size_t count) const;
  [[nodiscard]] std::vector<std::optional<std::string>> texts() const;

 private:
  Buffer memory_;  // pinned
};

// For each place two numbers, of which the ranks exchange the largest: so the message does not grow
// with the ranks. A rank without a digest leaves the place to the others.
[[nodiscard]] std::vector<std::int64_t> claims(
    std::span<const std::optional<std::uint64_t>> digests);
// `most`: the largest of all ranks' claims. Whether two ranks have different digests there.
[[nodiscard]] bool differs(std::span<const std::int64_t> most, std::size_t place);

struct DigestDifference {
  std::size_t place = 0;
  std::string text{};        // "other bits on rank 1 of 4 than on the rest"
  std::vector<int> ranks{};  // world ranks in the minority; all if there is none
};
// Collective over `group`: the first place where its ranks have different texts. The text counts
// ranks of `world`.
[[nodiscard]] std::optional<DigestDifference> find_difference(
    Communicator& group, const Communicator& world, const std::string& key,
    std::vector<std::optional<std::string>> digests);

// What to do about it.
inline constexpr const char* kDifferenceRemedy =
    "look for a fault of memory, GPU or link, and go on from a checkpoint of before that step";

// Rows of a step's result, which all replicas have alike.
struct ComparedRows {
  std::string owner;  // in errors
  std::function<std::vector<std::optional<std::string>>()> digests;
  std::function<std::string(std::size_t place)> name;
};
// The claims of this rank's rows, in the place of its shard rank.
[[nodiscard]] std::vector<std::int64_t> row_claims(const Groups& groups, std::uint64_t digest);
// `most`: the largest of all ranks' row_claims(). If replicas differ, ends the world on every rank
// by a MismatchError that names the place and the ranks in the minority.
void require_equal_rows(std::int64_t step, std::span<const std::int64_t> most, Groups& groups,
                        StepAgreement& agreement, const ComparedRows& rows);

}  // namespace hsdp::reducer
