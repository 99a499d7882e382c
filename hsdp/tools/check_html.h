// The HTML report of hsdp_check: one file without external resources.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace hsdp {

// A page with the findings; text from snapshots is escaped.
[[nodiscard]] std::string to_html(const nlohmann::ordered_json& findings);

// Whether `page`, or its beginning, comes from to_html() of this or another version.
[[nodiscard]] bool is_html_report(std::string_view page);

}  // namespace hsdp
