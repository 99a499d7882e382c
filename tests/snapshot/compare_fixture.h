// Compares snapshots that it writes.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "hsdp/compare.h"
#include "hsdp/error.h"
#include "tests/snapshot/written_snapshot.h"

namespace hsdp::testing {

class Compare : public ::testing::Test {
 protected:
  Snapshot write(const std::string& name, const std::vector<NamedGradient>& gradients,
                 const SnapshotInfo& info = mesh_info(1, 1), Dtype wire = Dtype::kF32) {
    write_mesh(folder_ / name, gradients, info, wire);
    return Snapshot::open(folder_ / name);
  }

  // Compares two single parameters that two ranks hold.
  ParameterDifference difference(const std::vector<float>& a, const std::vector<float>& b,
                                 const CompareOptions& options = {}, Dtype wire = Dtype::kF32) {
    const Shape shape{static_cast<std::int64_t>(a.size())};
    const Snapshot x = write("a", {{"w", shape, a}}, mesh_info(1, 2), wire);
    const Snapshot y = write("b", {{"w", shape, b}}, mesh_info(1, 2), wire);
    return compare_snapshots(x, y, options).parameters.at(0);
  }

  std::string refusal(const Snapshot& a, const Snapshot& b, const CompareOptions& options = {}) {
    try {
      static_cast<void>(compare_snapshots(a, b, options));
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  TemporaryDirectory folder_;
};

}  // namespace hsdp::testing
