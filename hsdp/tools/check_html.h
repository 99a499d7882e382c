// The HTML report of hsdp_check: one file without outside resources.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace hsdp {

// A page around the findings; texts of the snapshots cannot break out of it.
[[nodiscard]] std::string to_html(const nlohmann::ordered_json& findings);

}  // namespace hsdp
