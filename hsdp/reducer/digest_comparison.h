// Compares digests of values that should be the same on several ranks. One short message compares
// them all; only if a digest differs, the ranks exchange each one, to name the ranks in the
// minority [Note: results that are compared].
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

// Digests in pinned memory, to which kernels of the device add.
class Digests {
 public:
  Digests() = default;
  Digests(Device device, std::size_t count);
  void clear();
  [[nodiscard]] std::uint64_t* at(std::size_t i) const {
    return reinterpret_cast<std::uint64_t*>(memory_.data()) + i;
  }
  [[nodiscard]] std::size_t count() const { return memory_.size() / sizeof(std::uint64_t); }
  // Combines `count` digests into one that depends on their order.
  [[nodiscard]] std::uint64_t together(std::size_t first, std::size_t count) const;
  [[nodiscard]] std::vector<std::optional<std::string>> texts() const;

 private:
  Buffer memory_;
};

// Two numbers for each place. The ranks exchange their maximum, so the message does not grow with
// the number of ranks. A rank without a digest does not affect the maximum.
[[nodiscard]] std::vector<std::int64_t> claims(
    std::span<const std::optional<std::uint64_t>> digests);
// Whether two ranks have different digests at `place`. `most`: the maximum of all ranks' claims().
[[nodiscard]] bool differs(std::span<const std::int64_t> most, std::size_t place);

struct DigestDifference {
  std::size_t place = 0;
  std::string text{};        // "other bits on rank 1 of 4 than on the rest"
  std::vector<int> ranks{};  // world ranks in the minority; all if there is none
};
// Finds the first place where the digests of the ranks of `group` differ. Collective over `group`.
// The text gives ranks of `world`.
[[nodiscard]] std::optional<DigestDifference> find_difference(
    Communicator& group, const Communicator& world, const std::string& key,
    std::vector<std::optional<std::string>> digests);

inline constexpr const char* kDifferenceRemedy =
    "look for a fault of memory, GPU or link, and go on from a checkpoint of before that step";

// Rows of a step's result, which are the same on all replicas.
struct ComparedRows {
  std::string owner;  // who compares, for errors
  std::function<std::vector<std::optional<std::string>>()> digests;
  std::function<std::string(std::size_t place)> name;
};
// claims() with `digest`, that of this rank's rows, at the place of its shard rank.
[[nodiscard]] std::vector<std::int64_t> row_claims(const Groups& groups, std::uint64_t digest);
// If replicas differ, ends the world on every rank with a MismatchError that names the place and
// the ranks in the minority. `most`: the maximum of all ranks' row_claims().
void require_equal_rows(std::int64_t step, std::span<const std::int64_t> most, Groups& groups,
                        StepAgreement& agreement, const ComparedRows& rows);

}  // namespace hsdp::reducer
