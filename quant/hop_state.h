// A hop's saved errors, in host memory and independent of any hop: other hops may have other
// buckets, owners, replica counts or options.
//
// Keys are "{parameter}/r{replica}/o{flat offset}/{kind}" and, for the gathered half,
// "{parameter}/gather/o{flat offset}/{kind}". Kinds are "codes" (int8, as bytes) with "scales"
// (fp32, one per group), or "values" (fp32). Keys of the whole hop: "steps", "replicas" and
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
  int replica = 0;  // whose errors; kGathered: the gathered half's
  std::int64_t flat_offset = 0;
  std::int64_t count = 0;
};

// Either codes and scales, or values.
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

// How many groups overlap [begin, end) of a flattened parameter.
[[nodiscard]] std::int64_t groups_between(std::int64_t begin, std::int64_t end,
                                          std::int64_t group_size);

// The appended entries point into `header`.
void append(SavedHeader& header, std::vector<HopState>& to);
[[nodiscard]] std::string error_key(const ErrorPlace& place, std::string_view kind);
struct ErrorKey {
  ErrorPlace place;  // with count 0
  std::string kind;
};
// Nothing for a key of the whole hop. Throws UsageError for an invalid key.
[[nodiscard]] std::optional<ErrorKey> parse_error_key(const std::string& key);

// Whether replica `now` of `replicas` takes over errors of replica `before` of `replicas_before`:
// each set of replicas divides one line into equal intervals, and these two overlap.
[[nodiscard]] bool takes_over(std::int64_t before, std::int64_t replicas_before, std::int64_t now,
                              std::int64_t replicas);

class SavedState {
 public:
  // Copies `state`. Throws UsageError unless LocoHop has saved it.
  explicit SavedState(std::span<const HopState> state);

  [[nodiscard]] const SavedHeader& header() const { return header_; }

  struct Wanted {
    std::int64_t replicas = 0;
    std::int64_t group_size = 0;
    double err_beta = 0.0;
    bool as_values = false;  // otherwise codes and scales
  };
  // The errors of `place` for a hop with these settings. Unknown ones are zero; `*missing` counts
  // them. With the same replicas and groups, codes are kept. Otherwise they are decoded and
  // quantized again; throws UsageError if a value exceeds fp32's range. A replica that covers
  // several old ones takes their sum, and one that covers a part takes that part. A new beta
  // preserves what is owed, e / (1 - beta).
  [[nodiscard]] SavedErrors errors_of(const ErrorPlace& place, const Wanted& wanted,
                                      std::int64_t* missing) const;
  void scale(float factor);
  // Throws UsageError unless all errors lie within `parameters`, given with their element counts.
  void require_parts_of(const std::map<std::string, std::int64_t>& parameters) const;
  // Appends the state that this was made from. The entries point into this object.
  void append_to(std::vector<HopState>& state);

 private:
  // The errors of one parameter and replica, by offset.
  using Row = std::map<std::int64_t, SavedErrors>;
  struct Found {
    const SavedErrors* errors = nullptr;
    std::int64_t group_begin = 0;
    std::int64_t group_end = 0;
  };
  // One source of a place's errors: they are the sum of the rows times their weights.
  struct Source {
    const Row* row = nullptr;     // null: unknown
    std::optional<float> weight;  // none: 1
  };
  [[nodiscard]] const Row* row_of(const std::string& parameter, int replica) const;
  [[nodiscard]] std::vector<Source> sources_of(const ErrorPlace& place,
                                               std::int64_t replicas) const;
  [[nodiscard]] Found find(const Row& row, std::int64_t element) const;
  // to (+)= source * factor, from element `begin` on; returns how many elements are unknown.
  std::int64_t add_decoded(const Source& source, std::int64_t begin, float factor, bool is_first,
                           std::span<float> to) const;

  SavedHeader header_;
  std::map<std::pair<std::string, int>, Row> rows_;
};

}  // namespace hsdp::quant
