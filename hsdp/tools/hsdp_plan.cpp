// hsdp_plan: what the ranks of a job will hold and send. docs/hsdp_plan.md describes it.
#include <exception>
#include <iostream>

#include "hsdp/error.h"
#include "hsdp/tools/plan_options.h"
#include "hsdp/tools/plan_report.h"
#include "hsdp/tools/plan_text.h"

namespace hsdp {
namespace {

int run_plan(int argc, const char* const* argv) {
  try {
    const PlanOptions options = parse_plan_options(argc, argv);
    std::string text = options.message;
    if (text.empty()) {
      const PlanReport report = make_plan(options);
      text = options.json ? plan_json(options, report) : plan_text(options, report);
    }
    std::cout << text << std::flush;
    if (!std::cout) throw Error("cannot write to standard output");
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "hsdp_plan: " << error.what() << std::endl;
    return 2;
  }
}

}  // namespace
}  // namespace hsdp

int main(int argc, char** argv) { return hsdp::run_plan(argc, argv); }
