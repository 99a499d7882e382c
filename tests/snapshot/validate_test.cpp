#include "hsdp/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "hsdp/error.h"
#include "tests/snapshot/written_snapshot.h"

namespace hsdp {
namespace {

using namespace hsdp::testing;

class Validate : public ::testing::Test {
 protected:
  // Gives rank 3 of a 2x2 mesh different data from rank 1.
  void write_unequal(const std::vector<NamedGradient>& gradients,
                     const std::vector<NamedGradient>& others, SnapshotInfo info) {
    write_mesh(folder_ / "s", gradients, info);
    info.rank = 3;
    write_snapshot_file(folder_ / "s", info, slices_of(others, info));
  }
  Validation validate() { return validate_snapshot(Snapshot::open(folder_ / "s")); }

  TemporaryDirectory folder_;
};

TEST_F(Validate, PassesSoundSnapshots) {
  const auto gradients = some_gradients();
  write_mesh(folder_ / "s", gradients, mesh_info(2, 2));
  const Validation validation = validate();
  EXPECT_TRUE(validation.sound());
  EXPECT_EQ(validation.copy_count, 2);
  ASSERT_EQ(validation.parameters.size(), gradients.size());
  long double squared = 0;
  float largest = 0;
  for (const float value : gradients[6].data) {
    squared += static_cast<long double>(value) * static_cast<long double>(value);
    largest = std::max(largest, std::abs(value));
  }
  EXPECT_EQ(validation.parameters[6].max_absolute, largest);
  EXPECT_NEAR(validation.parameters[6].norm, static_cast<double>(std::sqrt(squared)), 1e-9);
}

// With layout "full" every rank holds a copy.
TEST_F(Validate, FindsUnequalCopies) {
  const struct {
    const char* layout;
    std::size_t parameter, element;
    int copy_count, unequal;
  } rows[] = {{"flat", 6, 150000, 2, 1}, {"full", 4, 0, 4, 3}};
  const auto gradients = some_gradients();
  for (const auto& row : rows) {
    SCOPED_TRACE(row.layout);
    auto others = gradients;
    others[row.parameter].data[row.element] += 1;
    write_unequal(gradients, others, mesh_info(2, 2, row.layout));
    const Validation validation = validate();
    EXPECT_FALSE(validation.sound());
    EXPECT_EQ(validation.copy_count, row.copy_count);
    EXPECT_EQ(validation.parameters[0].name, gradients[row.parameter].name);
    EXPECT_EQ(validation.parameters[0].first_unequal, row.element);
    EXPECT_EQ(validation.parameters[0].unequal_copy, row.unequal);
    EXPECT_TRUE(validation.parameters[1].sound());
  }
}

TEST_F(Validate, LetsPartialsDiffer) {
  SnapshotInfo info = mesh_info(2, 2);
  info.partial = true;
  write_unequal(some_gradients(1), some_gradients(2), info);
  EXPECT_TRUE(validate().sound());
}

TEST_F(Validate, FindsNanAndInfinity) {
  auto gradients = some_gradients();
  gradients[6].data[70000] = std::numeric_limits<float>::quiet_NaN();
  gradients[6].data[70005] = std::numeric_limits<float>::infinity();
  write_mesh(folder_ / "s", gradients, mesh_info(2, 2));
  const Validation validation = validate();
  EXPECT_FALSE(validation.sound());
  EXPECT_EQ(validation.parameters[0].nonfinite, 2);
  EXPECT_EQ(validation.parameters[0].first_nonfinite, 70000);
  EXPECT_TRUE(std::isfinite(validation.parameters[0].norm));
}

// A NaN in a partial of the second replica is also found.
TEST_F(Validate, LooksAtEveryPartial) {
  SnapshotInfo info = mesh_info(2, 2);
  info.partial = true;
  auto others = some_gradients();
  others[0].data[14] = std::numeric_limits<float>::quiet_NaN();
  write_unequal(some_gradients(), others, info);
  const Validation validation = validate();
  EXPECT_FALSE(validation.sound());
  EXPECT_EQ(validation.parameters[0].first_nonfinite, 14);
}

}  // namespace
}  // namespace hsdp
