// The findings of hsdp_check in the words and numbers that text, JSON and HTML share.
#pragma once

#include <cstdint>
#include <string>

#include "hsdp/compare.h"
#include "hsdp/validate.h"

namespace hsdp {

enum class ExitStatus : std::uint8_t { kSame = 0, kDifferent = 1, kCannotTell = 2 };

[[nodiscard]] ExitStatus exit_status(Verdict verdict);
[[nodiscard]] std::string to_string(Verdict verdict);
[[nodiscard]] std::string to_string(Criterion criterion);

// "[3, 17]": a flat index as coordinates of the shape.
[[nodiscard]] std::string position_text(std::int64_t index, const Shape& shape);
[[nodiscard]] std::string number_text(double value);           // three digits
[[nodiscard]] std::string ulp_text(double value);              // 2.05, 204, 1.3e+06
[[nodiscard]] std::string value_text(double value);            // enough to tell two apart
[[nodiscard]] std::string run_text(const SnapshotInfo& info);  // one line about a run
[[nodiscard]] std::string criterion_text(const Comparison& comparison);
// The last line of the output, without colour.
[[nodiscard]] std::string verdict_text(const Comparison& comparison);
[[nodiscard]] std::string verdict_text(const Validation& validation);

[[nodiscard]] std::int64_t total_count(const Comparison& comparison);
[[nodiscard]] std::int64_t different_count(const Comparison& comparison);

}  // namespace hsdp
