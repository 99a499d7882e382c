// Saved errors: what is not a state is refused, and a state that fits only in part says so.
// loco_hop_test.cpp covers that loading gives the right bits.
#include "quant/hop_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "hsdp/error.h"

namespace hsdp::quant {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// Errors of 100 elements of "a/b" from element 32 on, of replica 1 of 2, in groups of 64.
struct SomeState {
  SavedHeader header{.steps = 5, .replicas = 2, .group_size = 64, .err_beta = 0.75};
  std::vector<std::int8_t> codes = std::vector<std::int8_t>(100);
  std::vector<float> scales{0.5F, 2.0F, 4.0F};
  std::vector<HopState> state;

  SomeState() {
    std::iota(codes.begin(), codes.end(), static_cast<std::int8_t>(-50));
    append(header, state);
    state.push_back({"a/b/r1/o32/codes", {codes.data(), 100, Dtype::kU8, {}}});
    state.push_back({"a/b/r1/o32/scales", {scales.data(), 3, Dtype::kF32, {}}});
  }
  SomeState(const SomeState&) = delete;
  SomeState& operator=(const SomeState&) = delete;
  ~SomeState() = default;

  HopState& operator[](const std::string& key) {
    for (HopState& one : state) {
      if (one.key == key) return one;
    }
    return state.emplace_back();
  }
};

TEST(SavedState, NamesWhatIsWrong) {
  const auto expect = [](const std::string& text, const std::function<void(SomeState&)>& spoil) {
    SomeState some;
    spoil(some);
    EXPECT_THAT([&] { const SavedState state(some.state); },
                ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  expect("'steps' in it", [](SomeState& s) { s["steps"].key = "step"; });
  expect("'replicas' from 1", [](SomeState& s) { s.header.replicas = 0; });
  expect("multiple of 32", [](SomeState& s) { s.header.group_size = 100; });
  expect("'err_beta'", [](SomeState& s) { s.header.err_beta = 1.0; });
  expect("'steps' to be one i64", [](SomeState& s) { s["steps"].data.dtype = Dtype::kF64; });
  expect("errors of 1 replicas", [](SomeState& s) { s.header.replicas = 1; });
  expect("3 of 'a/b/r1/o32/scales' beside its 100 codes, got 2",
         [](SomeState& s) { s["a/b/r1/o32/scales"].data.count = 2; });
  expect("got 0", [](SomeState& s) { s["a/b/r1/o32/scales"].key = "a/b/r1/o33/scales"; });
  expect("in u8, got f32", [](SomeState& s) {
    s["a/b/r1/o32/codes"].data = {s.scales.data(), 3, Dtype::kF32, {}};
  });
  expect("either codes or values", [](SomeState& s) {
    s.state.push_back({"a/b/r1/o32/values", {s.scales.data(), 3, Dtype::kF32, {}}});
  });
  expect("of each element once", [](SomeState& s) {
    s.state.push_back({"a/b/r1/o131/values", {s.scales.data(), 3, Dtype::kF32, {}}});
  });
  expect("with 0 elements", [](SomeState& s) {
    s.state.push_back({"a/b/r1/o132/values", {s.scales.data(), 0, Dtype::kF32, {}}});
  });
  expect("finite numbers",
         [](SomeState& s) { s.scales[1] = std::numeric_limits<float>::infinity(); });
  for (const char* const key :
       {"a/b/r1/o32/code", "a/b/r-1/o32/codes", "a/b/r1/32/codes", "a/b/r1/o/codes", "x/codes",
        "a/r1/o99999999999999999999/codes", "a/r99999999/o0/codes", "a/r1/o0x/codes"}) {
    expect("keys like", [&](SomeState& s) { s["a/b/r1/o32/codes"].key = key; });
  }
}

TEST(SavedState, GivesWhatItHas) {
  const SomeState some;
  const SavedState state(some.state);
  EXPECT_EQ(state.header().steps, 5);
  std::int64_t missing = 0;
  const SavedState::Wanted same{.replicas = 2, .group_size = 64, .err_beta = 0.75};
  // From a group on, unchanged.
  SavedErrors errors = state.errors_of({"a/b", 1, 64, 68}, same, &missing);
  EXPECT_EQ(missing, 0);
  EXPECT_EQ(errors.scales, (std::vector{2.0F, 4.0F}));
  EXPECT_EQ(errors.codes.front(), -18);
  EXPECT_EQ(errors.codes.back(), 49);
  // Decoded, with half of the error, as beta differs; four elements are missing.
  SavedState::Wanted wanted = same;
  wanted.as_values = true;
  wanted.err_beta = 0.875;
  errors = state.errors_of({"a/b", 1, 30, 6}, wanted, &missing);
  EXPECT_EQ(missing, 2);
  EXPECT_EQ(errors.values, (std::vector{0.0F, 0.0F, -12.5F, -12.25F, -12.0F, -11.75F}));
  // The errors of another replica, of the gathered half, or of another parameter are ignored.
  for (const ErrorPlace& place :
       {ErrorPlace{"a/b", 0, 32, 10}, ErrorPlace{"a/b", ErrorPlace::kGathered, 32, 10},
        ErrorPlace{"a", 1, 32, 10}}) {
    missing = 0;
    errors = state.errors_of(place, same, &missing);
    EXPECT_EQ(missing, 10);
    EXPECT_EQ(errors.codes, std::vector<std::int8_t>(10, 0));
  }
}

TEST(SavedState, KnowsWhoseItIs) {
  const SomeState some;
  const SavedState state(some.state);
  EXPECT_NO_THROW(state.require_parts_of({{"a/b", 132}, {"c", 1}}));
  EXPECT_THAT(
      [&] {
        state.require_parts_of({{"b", 132}});
      },
      ThrowsMessage<UsageError>(HasSubstr("'a/b', which it has not")));
  EXPECT_THAT(
      [&] {
        state.require_parts_of({{"a/b", 131}});
      },
      ThrowsMessage<UsageError>(HasSubstr("131 elements, got some of element 131")));
}

TEST(SavedState, IsWhatItWasMadeOf) {
  const SomeState some;
  SavedState state(some.state);
  std::vector<HopState> again;
  state.append_to(again);
  ASSERT_EQ(again.size(), some.state.size());
  for (std::size_t i = 0; i < again.size(); ++i) {
    EXPECT_EQ(again[i].key, some.state[i].key);
    ASSERT_EQ(again[i].data.size_in_bytes(), some.state[i].data.size_in_bytes());
    EXPECT_EQ(
        std::memcmp(again[i].data.data, some.state[i].data.data, again[i].data.size_in_bytes()), 0);
  }
  state.scale(0.5F);
  EXPECT_EQ(static_cast<const float*>(again.back().data.data)[1], 1.0F);
}

TEST(SavedState, RefusesWhatLeavesTheRange) {
  SomeState some;
  some.header.err_beta = 1.0 - 0x1p-50;
  some.scales[0] = 1e30F;
  const SavedState state(some.state);
  std::int64_t missing = 0;
  EXPECT_THROW(static_cast<void>(state.errors_of({"a/b", 1, 32, 32}, {2, 64, 0.0}, &missing)),
               UsageError);
}

// Whatever the input, either a UsageError or errors that fit what was asked for.
TEST(SavedState, SurvivesAnything) {
  std::mt19937 random(5);
  const auto number = [&random](std::size_t end) { return random() % end; };
  int accepted = 0;
  for (int round = 0; round < 4'000; ++round) {
    SomeState some;
    for (std::size_t change = 1 + number(3); change > 0; --change) {
      HopState& one = some.state[number(some.state.size())];
      switch (number(6)) {
        case 0:
          one.key[number(one.key.size())] = "/o0r1-codes"[number(11)];
          break;
        case 1:
          one.data.count =
              static_cast<std::int64_t>(number(static_cast<std::size_t>(one.data.count) + 1));
          break;
        case 2:
          one.data.dtype = Dtype::kU8;
          break;
        case 3:
          some.header.group_size = 32 * static_cast<std::int64_t>(number(130));
          some.header.replicas = static_cast<std::int64_t>(number(70'000));
          break;
        case 4:
          some.scales[number(3)] = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
          break;
        default:
          one.key.insert(number(one.key.size()), 1, static_cast<char>(number(256)));
      }
    }
    try {
      const SavedState state(some.state);
      std::int64_t missing = 0;
      const SavedErrors errors = state.errors_of(
          {"a/b", static_cast<int>(number(3)) - 1, 30, 110},
          {2 + static_cast<std::int64_t>(number(4)), 96, 0.5, number(2) == 0}, &missing);
      EXPECT_EQ(std::ssize(errors.codes) + std::ssize(errors.values), 110);
      ++accepted;
    } catch (const UsageError&) {  // as expected
    }
  }
  EXPECT_GT(accepted, 200);
}

TEST(SavedState, KeysAreThereAndBack) {
  for (const ErrorPlace& place :
       {ErrorPlace{"layers.0.weight", 3, 1 << 20, 0}, ErrorPlace{"a/r1/o2/codes", 0, 0, 0},
        ErrorPlace{"w", ErrorPlace::kGathered, 64, 0}}) {
    const auto key = parse_error_key(error_key(place, "scales"));
    ASSERT_TRUE(key);
    EXPECT_EQ(key->place.parameter, place.parameter);
    EXPECT_EQ(key->place.replica, place.replica);
    EXPECT_EQ(key->place.flat_offset, place.flat_offset);
    EXPECT_EQ(key->kind, "scales");
  }
  EXPECT_FALSE(parse_error_key("steps"));
}

// It must not ask for more than that either.
TEST(SavedState, ReplicasTakeOverWhatTheyCover) {
  EXPECT_TRUE(takes_over(0, 2, 1, 4));
  EXPECT_FALSE(takes_over(0, 2, 2, 4));
  EXPECT_TRUE(takes_over(3, 4, 1, 2));
  EXPECT_TRUE(takes_over(1, 3, 0, 2));
  EXPECT_TRUE(takes_over(1, 3, 1, 2));
  EXPECT_FALSE(takes_over(2, 3, 0, 2));
}

}  // namespace
}  // namespace hsdp::quant
