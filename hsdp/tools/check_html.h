// The HTML report of hsdp_check: one file without outside resources.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace hsdp {

// A page around the findings; texts of the snapshots cannot break out of it.
[[nodiscard]] std::string to_html(const nlohmann::ordered_json& findings);

// Whether a page, or the begin of one, is of to_html(), also of another version.
[[nodiscard]] bool is_html_report(std::string_view page);

}  // namespace hsdp
