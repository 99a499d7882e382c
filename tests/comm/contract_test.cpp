// The contract on every transport of the host engine, between threads.
#include <vector>

#include "tests/comm/contract_suite.h"

namespace hsdp::test {
namespace {

std::vector<ContractCase> host_cases() {
  std::vector<ContractCase> cases;
  for (int size = 1; size < 6; ++size) {
    for (const Path path : {Path::kDirect, Path::kPrivate, Path::kTcp, Path::kMixed}) {
      cases.push_back({.name = name(path) + "_" + std::to_string(size),
                       .size = size,
                       .path = path,
                       .run = [size, path](const auto& body) {
                         run_world({.size = size, .path = path}, body);
                       }});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Host, Contract, testing::ValuesIn(host_cases()),
                         [](const auto& chosen) { return chosen.param.name; });

}  // namespace
}  // namespace hsdp::test
