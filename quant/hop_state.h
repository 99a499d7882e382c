// A hop's errors as they are saved: apart from any hop, in host memory, for hops with other
// buckets, owners, replica counts or options.
//
// Keys are "{parameter}/r{replica}/o{flat offset}/{kind}" and, for the gathered half,
// "{parameter}/gather/o{flat offset}/{kind}"; kinds are "codes" (int8 in bytes) with "scales"
// (fp32, one a group), or "values" (fp32). Of the hop as a whole: "steps", "replicas" and
// "group_size" (i64), "err_beta" (f64).
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/replica_hop.h"

namespace hsdp::quant {

// Elements [flat_offset, flat_offset + count) of a flattened parameter.
struct ErrorPlace {
  static constexpr int kGathered = -1;
  std::string parameter;
  int replica = 0;  // whose errors; kGathered: of the gathered half
  std::int64_t flat_offset = 0;
  std::int64_t count = 0;
};

// Either codes and scales or values.
struct SavedErrors {
  ErrorPlace place;
  std::vector<std::int8_t> codes;
  std::vector<float> scales;
  std::vector<float> values;
};

struct SavedHeader {
  std::int64_t steps = 0;
  std::int64_t replicas = 0;
  std::int64_t group_size = 0;
  double err_beta = 0.0;
};

// Groups that lie in [begin, end) of a flattened parameter, also in part.
[[nodiscard]] std::int64_t groups_between(std::int64_t begin, std::int64_t end,
                                          std::int64_t group_size);

// Points to `header`.
void append(SavedHeader& header, std::vector<HopState>& to);
[[nodiscard]] std::string error_key(const ErrorPlace& place, std::string_view kind);
struct ErrorKey {
  ErrorPlace place;  // without a count
  std::string kind;
};
// Nothing for a key of the hop as a whole; UsageError for what is no key.
[[nodiscard]] std::optional<ErrorKey> parse_error_key(const std::string& key);

// Whether replica `now` of `replicas` takes over errors of replica `before` of `replicas_before`:
// where the replicas are intervals of one line, these two overlap.
[[nodiscard]] bool takes_over(std::int64_t before, std::int64_t replicas_before, std::int64_t now,
                              std::int64_t replicas);

class SavedState {
 public:
  // Copies it. UsageError unless it is a state that LocoHop has saved.
  explicit SavedState(std::span<const HopState> state);

  [[nodiscard]] const SavedHeader& header() const { return header_; }

  struct Wanted {
    std::int64_t replicas = 0;
    std::int64_t group_size = 0;
    double err_beta = 0.0;
    bool as_values = false;  // else codes and scales
  };
  // The errors of a place in a hop of that kind; zero where some are not known, `*missing` counts
  // these elements. Codes are kept as they are where replicas and groups are the same; otherwise
  // they are decoded, and coded anew; UsageError where that leaves fp32's range. A replica that
  // covers several old ones takes their sum, one that covers a part takes that part; another beta
  // leaves what is owed, e / (1 - beta), alone.
  [[nodiscard]] SavedErrors errors_of(const ErrorPlace& place, const Wanted& wanted,
                                      std::int64_t* missing) const;
  void scale(float factor);
  // UsageError unless all of it is of those parameters, which have so many elements.
  void require_parts_of(const std::map<std::string, std::int64_t>& parameters) const;
  // Appends what it was made of, in its own memory.
  void append_to(std::vector<HopState>& state);

 private:
  // Of one parameter and replica, by offset.
  using Row = std::map<std::int64_t, SavedErrors>;
  struct Found {
    const SavedErrors* errors = nullptr;
    std::int64_t group_begin = 0;
    std::int64_t group_end = 0;
  };
  // What a place's errors are made of: the sum of each row times its weight.
  struct Source {
    const Row* row = nullptr;     // null: not known
    std::optional<float> weight;  // none: 1
  };
  [[nodiscard]] const Row* row_of(const std::string& parameter, int replica) const;
  [[nodiscard]] std::vector<Source> sources_of(const ErrorPlace& place,
                                               std::int64_t replicas) const;
  [[nodiscard]] Found find(const Row& row, std::int64_t element) const;
  // to (+)= source * factor, from element `begin` on; returns how many were not found.
  std::int64_t add_decoded(const Source& source, std::int64_t begin, float factor, bool is_first,
                           std::span<float> to) const;

  SavedHeader header_;
  std::map<std::pair<std::string, int>, Row> rows_;
};

}  // namespace hsdp::quant
