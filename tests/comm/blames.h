// A matcher for calls that fail because of other ranks.
#pragma once

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "hsdp/error.h"

namespace hsdp::test {

// The call throws an E that names these ranks, and whose message holds all of `parts`.
template <typename E>
auto blames(const std::vector<int>& ranks, const std::vector<std::string>& parts) {
  std::vector<testing::Matcher<std::string>> holds;
  for (const std::string& part : parts) holds.emplace_back(testing::HasSubstr(part));
  return testing::Throws<E>(
      testing::AllOf(testing::Property("ranks", &E::ranks, testing::ElementsAreArray(ranks)),
                     testing::Property("what", &E::what, testing::AllOfArray(holds))));
}

}  // namespace hsdp::test
