// The findings of hsdp_check as JSON; docs/hsdp_check.md describes the schema.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "hsdp/compare.h"
#include "hsdp/validate.h"

namespace hsdp {

// `detail` adds heat strips and histograms, for the HTML report.
[[nodiscard]] nlohmann::ordered_json to_json(const Comparison& comparison, bool detail = false);
[[nodiscard]] nlohmann::ordered_json to_json(const Validation& validation);
[[nodiscard]] nlohmann::ordered_json error_to_json(const std::string& message);

// Serializes any JSON; replaces bytes that are not UTF-8 (paths may have them). -1: one line.
[[nodiscard]] std::string dump(const nlohmann::ordered_json& findings, int indent);

}  // namespace hsdp
