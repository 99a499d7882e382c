// The contract of every engine, on the NCCL engine over the stand-in for libnccl.
#include <string>
#include <vector>

#include "device_world.h"
#include "nccl_ranks.h"
#include "tests/comm/contract_suite.h"

namespace hsdp::test {
namespace {

std::vector<ContractCase> cases() {
  std::vector<ContractCase> all;
  for (int size = 1; size <= 3; ++size) {
    for (const Path path : {Path::kDirect, Path::kPrivate}) {
      all.push_back({(path == Path::kDirect ? "allocated_" : "private_") + std::to_string(size),
                     size, path, [size](const std::function<void(Communicator&)>& body) {
                       run_nccl_ranks(size, [&](Communicator& world) {
                         Communicator same = stand_in::with_host_views(world, gpu_of(world.rank()));
                         body(same);
                       });
                     }});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Nccl, Contract, testing::ValuesIn(cases()),
                         [](const auto& chosen) { return chosen.param.name; });

}  // namespace
}  // namespace hsdp::test
