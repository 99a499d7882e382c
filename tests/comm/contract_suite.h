// The contract of every engine as a suite of parameterised tests. Whoever instantiates it says how
// the ranks of a world are made to run a function.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tests/comm/rank_threads.h"

namespace hsdp::test {

struct ContractCase {
  std::string name;
  int size = 1;
  Path path = Path::kPrivate;  // kDirect: the tests' memory comes from allocate()
  // Runs `body` on every rank of a group, or on the one rank that is this process.
  std::function<void(const std::function<void(Communicator&)>& body)> run;
};

inline void PrintTo(const ContractCase& chosen, std::ostream* out) { *out << chosen.name; }

class Contract : public testing::TestWithParam<ContractCase> {
 protected:
  [[nodiscard]] static int size() { return GetParam().size; }
  [[nodiscard]] static Path path() { return GetParam().path; }
  static void run(const std::function<void(Communicator&)>& body) { GetParam().run(body); }
};

}  // namespace hsdp::test
