// The report of hsdp_plan as tables and as JSON; docs/hsdp_plan.md describes both.
#pragma once

#include <string>

#include "hsdp/tools/plan_report.h"

namespace hsdp {

[[nodiscard]] std::string plan_text(const PlanOptions& options, const PlanReport& report);
[[nodiscard]] std::string plan_json(const PlanOptions& options, const PlanReport& report);

}  // namespace hsdp
