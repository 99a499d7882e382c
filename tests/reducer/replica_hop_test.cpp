// What a replica hop may rely on, shown by a hop that needs all of it, and a contract for any hop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "hsdp/error.h"
#include "tests/support/fake_hop.h"
#include "tests/support/hop_contract.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kDivisor = 4;  // S R
constexpr std::int64_t kBucketBytes = 512;

std::vector<ParameterSpec> some_parameters() {
  return {{.name = "norm", .shape = {37}},
          {.name = "large", .shape = {30, 20}},
          {.name = "small", .shape = {5}},
          {.name = "late", .shape = {100}, .group = "late"},
          {.name = "bias", .shape = {41}}};
}

FakeHop::Options some_options() { return {.excluded = {"norm", "bias"}}; }

// What FakeHop computes from whole parameters, written independently.
class Model {
 public:
  // Every gradient of one step. Group "late" has sync all in the last microbatch only, the others
  // in every one.
  std::vector<Values> run(const StepCase& step) {
    std::vector<Values> means;
    const auto microbatches = static_cast<int>(step.gradients.front().size());
    for (std::size_t p = 0; p < step.parameters.size(); ++p) {
      const ParameterSpec& spec = step.parameters[p];
      const auto count = static_cast<std::size_t>(element_count(spec.shape));
      auto& errors = errors_.try_emplace(spec.name, 2, Values(count)).first->second;
      Values& mean = means.emplace_back(count);
      const bool late = spec.group == "late";
      for (int m = 0; m < microbatches; ++m) {
        if (late && m + 1 < microbatches) continue;
        for (std::size_t i = 0; i < count; ++i) {
          std::vector<float> sums(2);
          for (int k = late ? 0 : m; k <= m; ++k) {
            const auto& ranks = step.gradients[p][static_cast<std::size_t>(k)];
            for (std::size_t r = 0; r < ranks.size(); ++r) sums[r / 2] += (*ranks[r])[i];
          }
          std::vector<float> error{errors[0][i], errors[1][i]};
          mean[i] += some_options().excluded.contains(spec.name) ? (sums[0] + sums[1]) / kDivisor
                                                                 : fake_mean(sums, kDivisor, error);
          errors[0][i] = error[0];
          errors[1][i] = error[1];
        }
      }
    }
    return means;
  }

 private:
  std::map<std::string, std::vector<Values>> errors_;  // [replica]
};

// As Model::run: early groups have sync all in every microbatch.
std::vector<Values> run_with_flags(Reducer& reducer, const StepCase& step, int rank) {
  const auto microbatches = static_cast<int>(step.gradients.front().size());
  for (int m = 0; m < microbatches; ++m) {
    reducer.set_requires_all_reduce(m + 1 == microbatches, "late");
    run_microbatch(reducer, step, m, rank, {});
  }
  return gathered(reducer, step);
}

StepCase some_step(int microbatches, std::uint64_t seed) {
  return integer_step(some_parameters(), kSquare.size(), microbatches, seed);
}

struct Made {
  std::shared_ptr<FakeHop> hop;
  std::unique_ptr<Reducer> reducer;
};

Made make(const Mesh& mesh, const FakeHop::Options& options = some_options(),
          std::int64_t bucket_bytes = kBucketBytes) {
  Made made;
  made.hop = std::make_shared<FakeHop>(options);
  made.reducer = std::make_unique<Reducer>(
      mesh, ReducerOptions{.bucket_bytes = bucket_bytes, .replica_hop = made.hop});
  for (const ParameterSpec& spec : some_parameters()) made.reducer->register_parameter(spec);
  return made;
}

struct HopCase {
  std::string label;
  MakeHop make;
};

std::vector<HopCase> every_hop() {
  return {{"plain", [] { return std::make_shared<PlainHop>(); }},
          {"plain_bf16", [] { return std::make_shared<PlainHop>(Dtype::kBf16); }},
          {"fake", [] { return std::make_shared<FakeHop>(some_options()); }}};
}

class HopContract : public testing::TestWithParam<HopCase> {};

TEST_P(HopContract, IsKept) {
  for (const MeshShape shape : {kSquare, MeshShape{3, 1}, MeshShape{3, 2}}) {
    SCOPED_TRACE(to_string(shape));
    check_hop_contract(GetParam().make, shape);
  }
}

INSTANTIATE_TEST_SUITE_P(Hops, HopContract, testing::ValuesIn(every_hop()),
                         [](const auto& row) { return row.param.label; });

TEST(QuantizingHop, KeepsItsErrorsFromStepToStep) {
  for (const std::int64_t bucket_bytes : {256, 4096}) {
    Model model;
    std::vector<StepCase> steps;
    std::vector<std::vector<Values>> expected;
    for (const int microbatches : {1, 3, 2, 1}) {
      steps.push_back(some_step(microbatches, 7 + steps.size()));
      expected.push_back(model.run(steps.back()));
    }
    run_mesh(kSquare, [&](const Mesh& mesh) {
      const Made made = make(mesh, some_options(), bucket_bytes);
      for (std::size_t s = 0; s < steps.size(); ++s) {
        EXPECT_EQ(run_with_flags(*made.reducer, steps[s], mesh.rank()), expected[s]) << s;
      }
      EXPECT_GT(made.hop->most_in_flight(), 1);
      EXPECT_EQ(made.reducer->stats().replica_hop_state_bytes, 783 * 4);
      EXPECT_THAT(outcomes(made.hop->ends()), Each(StepOutcome::kClean));
      EXPECT_EQ(made.hop->ends().size(), steps.size());
    });
  }
}

// Codes have one byte, gathered means four. Excluded elements travel in fp32 both ways.
TEST(QuantizingHop, IsCountedByWhatItsGroupsCarry) {
  std::atomic<std::int64_t> bytes{0};
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const Made made = make(mesh);
    run_with_flags(*made.reducer, some_step(1, 1), mesh.rank());
    bytes += made.reducer->stats().replica_hop_bytes;
  });
  constexpr int kExcluded = 37 + 41;
  EXPECT_EQ(bytes, 2 * (705 * (1 + 4) + kExcluded * (4 + 4)));
}

TEST(QuantizingHop, CutsAtItsMultiplesAndSharesNoBucketWithWhatItExcludes) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const Made made = make(mesh);
    made.reducer->prepare();
    for (std::size_t b = 0; b < made.hop->plan().ranges.size(); ++b) {
      bool excluded = false;
      bool other = false;
      for (const ParameterRange& range : made.hop->plan().ranges[b]) {
        const auto& parameter =
            made.hop->plan().parameters[static_cast<std::size_t>(range.parameter)];
        EXPECT_EQ(range.flat_offset % 8, 0) << parameter.name;
        (some_options().excluded.contains(parameter.name) ? excluded : other) = true;
      }
      EXPECT_FALSE(excluded && other) << b;
    }
    for (const ParameterSpec& spec : some_parameters()) {
      const Slice slice = made.reducer->slice(spec.name);
      EXPECT_TRUE(slice.offset % 8 == 0 || slice.count == 0) << spec.name;
    }
  });
}

// The contract includes that such steps leave no trace.
TEST(QuantizingHop, IsToldHowEachStepEnded) {
  const StepCase clean = some_step(1, 2);
  StepCase overflows = some_step(1, 3);
  (*overflows.gradients[1][0][2])[17] = std::numeric_limits<float>::infinity();
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const Made made = make(mesh);
    Reducer& reducer = *made.reducer;
    run_with_flags(reducer, overflows, mesh.rank());
    EXPECT_TRUE(reducer.found_inf());
    if (mesh.rank() == 1) {
      reducer.begin_step();
      reducer.abandon_step("on purpose");
    } else {
      EXPECT_THROW(run_with_flags(reducer, clean, mesh.rank()), StepAbortedError);
    }
    run_with_flags(reducer, clean, mesh.rank());
    const std::vector<StepEnd> ends = made.hop->ends();
    EXPECT_THAT(outcomes(ends),
                ElementsAre(StepOutcome::kOverflow, StepOutcome::kDropped, StepOutcome::kClean));
    EXPECT_THAT(ends[1].cause, HasSubstr("on purpose"));
  });
}

TEST(HopOwners, AreOneAtATime) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    const Made made = make(mesh);
    Reducer another(mesh, {.replica_hop = made.hop});
    another.register_parameter({.name = "w", .shape = {4}});
    made.reducer->prepare();
    EXPECT_THAT(caught<UsageError>([&] { another.prepare(); }),
                says(HasSubstr("replica hop fake: expected one Reducer")));
    made.reducer->close();
    const StepCase step = some_step(1, 1);
    Made again;
    {
      Made gone = make(mesh);
      gone.reducer->prepare();
      again.hop = gone.hop;
    }
    again.reducer = std::make_unique<Reducer>(mesh, ReducerOptions{.replica_hop = again.hop});
    register_all(*again.reducer, step);
    run_with_flags(*again.reducer, step, mesh.rank());
  });
}

TEST(HopMismatch, OfOptionsAndOfWordsIsNamedOnAllRanks) {
  run_patiently(kSquare, [](const Mesh& mesh) {
    FakeHop::Options options;
    if (mesh.rank() == 2) options.name = "odd";
    EXPECT_THAT(caught<MismatchError>([&] { static_cast<void>(make(mesh, options)); }),
                says(HasSubstr("replica_hop=odd")));
    options.name = "fake";
    if (mesh.rank() == 2) options.word = "step 7";
    const Made made = make(mesh, options);
    const auto run = [&] { run_with_flags(*made.reducer, some_step(1, 1), mesh.rank()); };
    EXPECT_THAT(caught<MismatchError>(run),
                names({2}, HasSubstr("expected replica hop fake 'same' on every rank, "
                                     "got 'step 7' on rank 2 of 4")));
  });
}

// Fails once, at that place on one rank.
FakeHop::Options failing_at(std::string place, bool fails) {
  FakeHop::Options options = some_options();
  auto left = std::make_shared<int>(fails ? 1 : 0);
  options.on = [place = std::move(place), left](std::string_view at) {
    if (at == place && (*left)-- > 0) throw Error("hop: no memory for codes");
  };
  return options;
}

// Rank 3 says what failed; the other ranks say that rank 3 failed in its `task`.
void expect_failure(const Mesh& mesh, const std::string& task, const std::function<void()>& call) {
  const std::string of_others = mesh.rank() == 3 ? "" : "rank 3 of 4 could not " + task;
  EXPECT_THAT(caught<Error>(call),
              says(AllOf(HasSubstr("hop: no memory for codes"), HasSubstr(of_others))));
}

TEST(HopFailure, OfADescriptionIsToldAndMayBeTriedAgain) {
  run_patiently(kSquare, [&](const Mesh& mesh) {
    const FakeHop::Options options = failing_at("describe", mesh.rank() == 3);
    expect_failure(mesh, "make its Reducer", [&] { static_cast<void>(make(mesh, options)); });
    run_with_flags(*make(mesh, options).reducer, some_step(1, 1), mesh.rank());
  });
}

TEST(HopFailure, OfADescriptionThatNoSnapshotHolds) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    for (const std::string& name :
         {std::string(), std::string(128, 'x'), std::string("bits\n4"), std::string("\xff")}) {
      EXPECT_THAT(caught<UsageError>([&] { static_cast<void>(make(mesh, {.name = name})); }),
                  says(HasSubstr("one line of UTF-8 of 1 to 127 bytes, got " +
                                 std::to_string(name.size()) + " bytes")));
    }
  });
}

TEST(HopFailure, OfPrepareIsToldAndMayBeTriedAgain) {
  const StepCase step = some_step(1, 1);
  const std::vector<Values> expected = Model().run(step);
  run_patiently(kSquare, [&](const Mesh& mesh) {
    const Made made = make(mesh, failing_at("prepare", mesh.rank() == 3));
    expect_failure(mesh, "prepare its replica hop", [&] { made.reducer->prepare(); });
    const ReducerStats stats = made.reducer->stats();  // the hop's memory counts as the hop's
    EXPECT_EQ(stats.resident_bytes, stats.replica_hop_state_bytes);
    EXPECT_EQ(run_with_flags(*made.reducer, step, mesh.rank()), expected);
  });
}

TEST(HopFailure, OfAWordDropsTheStep) {
  const StepCase step = some_step(1, 1);
  const std::vector<Values> expected = Model().run(step);
  run_patiently(kSquare, [&](const Mesh& mesh) {
    const bool fails = mesh.rank() == 3;
    const Made made = make(mesh, failing_at("word", fails));
    const auto run = [&] { run_with_flags(*made.reducer, step, mesh.rank()); };
    if (fails) {
      EXPECT_THROW(run(), Error);
    } else {
      EXPECT_THAT(caught<StepAbortedError>(run), names({3}));
    }
    EXPECT_EQ(run_with_flags(*made.reducer, step, mesh.rank()), expected);
  });
}

class HopFailureAt : public testing::TestWithParam<std::string> {};

TEST_P(HopFailureAt, ReachesTheOthersAtOnceWithItsText) {
  const auto start = std::chrono::steady_clock::now();
  run_patiently(kSquare, [](const Mesh& mesh) {
    const bool fails = mesh.rank() == 3;
    const Made made = make(mesh, failing_at(GetParam(), fails));
    const auto run = [&] { run_with_flags(*made.reducer, some_step(1, 1), mesh.rank()); };
    // If a hop could not be told that the step ended, that step's result still stands.
    if (GetParam() == "end_step" && !fails) static_cast<void>(caught<Error>(run));
    for (int repeat = 0; repeat < 2; ++repeat) {
      EXPECT_THAT(caught<Error>(run), says(HasSubstr("hop: no memory for codes")));
    }
    if (!fails) {
      EXPECT_THAT(caught<RankError>(run), names({3}));
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

INSTANTIATE_TEST_SUITE_P(Places, HopFailureAt, testing::Values("reduce", "codec", "end_step"),
                         [](const auto& row) { return row.param; });

class Party final : public StepParty {
 public:
  [[nodiscard]] std::string owner() const override { return "optimizer"; }
  [[nodiscard]] std::string word() const override { return prefix + std::to_string(ends.size()); }
  void end_step(const StepEnd& end) override { ends.push_back(end); }

  std::string prefix = "v";
  std::vector<StepEnd> ends;
};

// One rank of run_with_party().
struct PartyRank {
  int rank;
  const StepCase& step;  // of one microbatch
  Reducer& reducer;
  std::shared_ptr<Party> party;
  void run_step() const { test::run_step(reducer, step, rank); }
};

// A Reducer with a party on each of two ranks.
void run_with_party(const std::function<void(PartyRank& own)>& body,
                    const ThreadRanksOptions& options = kPatient) {
  const StepCase step = integer_step(some_parameters(), 2, 1, 1);
  run_reducers(
      {1, 2}, step, {},
      [&](Reducer& reducer, const Mesh& mesh) {
        PartyRank own{mesh.rank(), step, reducer, std::make_shared<Party>()};
        reducer.add_party(own.party);
        body(own);
      },
      options);
}

TEST(StepParties, AreToldHowEveryStepEndedUntilTheyGo) {
  run_with_party([](PartyRank& own) {
    Reducer& reducer = own.reducer;
    reducer.add_party(std::make_shared<Party>());  // destroyed at the end of this line
    own.run_step();
    run_microbatch(reducer, own.step, 0, own.rank, {.sync = Sync::kShard});
    EXPECT_THROW(reducer.add_party(own.party), UsageError);
    reducer.discard();
    reducer.begin_step();
    reducer.abandon_step("on purpose");
    own.run_step();
    const std::vector<StepEnd>& ends = own.party->ends;
    EXPECT_THAT(outcomes(ends), ElementsAre(StepOutcome::kClean, StepOutcome::kDropped,
                                            StepOutcome::kDropped, StepOutcome::kClean));
    EXPECT_EQ(ends[2].cause, "on purpose");
  });
}

TEST(StepParties, ThatDifferAreNamed) {
  run_with_party([](PartyRank& own) {
    own.party->prefix = own.rank == 0 ? "v1" : "v2";
    EXPECT_THAT(caught<MismatchError>([&] { own.run_step(); }),
                says(HasSubstr("expected optimizer 'v10'")));
  });
}

// The previous step may end late, and on some ranks only.
TEST(StepParties, HearOfNoStepBeforeTheyCame) {
  run_with_party([](PartyRank& own) {
    constexpr std::chrono::milliseconds kLate{100};
    Reducer& reducer = own.reducer;
    reducer.begin_microbatch({.last = true});
    const std::vector<StoredGradient> gradients = deliver(reducer, own.step, 0, own.rank);
    if (own.rank == 1) std::this_thread::sleep_for(kLate);
    reducer.end_microbatch();
    if (own.rank == 1) std::this_thread::sleep_for(kLate);
    const auto party = std::make_shared<Party>();
    reducer.add_party(party);
    own.run_step();
    ASSERT_EQ(party->ends.size(), 1U);
    EXPECT_EQ(party->ends.front().step, 1);
  });
}

// A party that is gone on one rank is not compared. Once it is gone on all ranks it is forgotten.
TEST(StepParties, MayGoOnOneRankBeforeTheOthers) {
  run_with_party([](PartyRank& own) {
    std::array<std::shared_ptr<Party>, 3> parties{std::move(own.party), std::make_shared<Party>(),
                                                  std::make_shared<Party>()};
    own.reducer.add_party(parties[1]);
    own.reducer.add_party(parties[2]);
    own.run_step();
    parties[static_cast<std::size_t>(own.rank)].reset();
    own.run_step();
    EXPECT_EQ(parties[2]->ends.size(), 2U);
    parties[0].reset();
    parties[1].reset();
    for (int s = 0; s < 3; ++s) own.run_step();
    EXPECT_EQ(parties[2]->ends.size(), 5U);
    const auto odd = std::make_shared<Party>();
    odd->prefix = "odd " + std::to_string(own.rank);
    own.reducer.add_party(odd);
    EXPECT_THROW(own.run_step(), MismatchError);
  });
}

// A step that has begun ends for its parties, even when the world has ended.
TEST(StepParties, HearOfAStepThatWasCut) {
  const StepCase step = integer_step(some_parameters(), kSquare.size(), 1, 1);
  for (const bool closes : {false, true}) {
    const auto run = [&](Communicator& world) {
      const Mesh mesh(world, MeshOptions{.replicate = 2, .shard = 2});
      const auto hop = std::make_shared<FakeHop>();
      const auto party = std::make_shared<Party>();
      {
        Reducer reducer(mesh, {.replica_hop = hop});
        register_all(reducer, step);
        reducer.add_party(party);
        run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kShard});
        if (mesh.rank() == 0) world.abort("on purpose");
        EXPECT_THROW(reducer.finish(), Error);
        EXPECT_TRUE(party->ends.empty());
        if (closes) reducer.close();
        EXPECT_EQ(party->ends.size(), closes ? 1U : 0U);
      }
      for (const std::vector<StepEnd>& ends : {hop->ends(), party->ends}) {
        ASSERT_EQ(ends.size(), 1U);
        EXPECT_EQ(ends.front().outcome, StepOutcome::kDropped);
        EXPECT_THAT(ends.front().cause, HasSubstr("on purpose"));
      }
    };
    static_cast<void>(try_ranks(kSquare.size(), run, kPatient));
  }
}

// The peers stay away, so close() gives up after the timeout.
TEST(StepParties, HearOfAStepThatACloseLeft) {
  constexpr ThreadRanksOptions kShort{.timeout = std::chrono::seconds(1),
                                      .deadline = std::chrono::seconds(30)};
  std::atomic<bool> closed{false};
  run_with_party(
      [&](PartyRank& own) {
        run_microbatch(own.reducer, own.step, 0, own.rank, {.sync = Sync::kShard});
        if (own.rank == 0) {
          own.reducer.close();
          const std::vector<StepEnd>& ends = own.party->ends;
          ASSERT_EQ(ends.size(), 1U);
          EXPECT_EQ(ends.front().outcome, StepOutcome::kDropped);
          EXPECT_THAT(ends.front().cause, HasSubstr("closed"));
          closed = true;
        }
        while (!closed) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      },
      kShort);
}

// With one replica the hop is never called.
TEST(QuantizingHop, IsNotUsedWithOneReplica) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    const Made made = make(mesh);
    run_with_flags(*made.reducer, integer_step(some_parameters(), 2, 2, 1), mesh.rank());
    EXPECT_EQ(made.hop->most_in_flight(), 0);
    EXPECT_TRUE(made.hop->ends().empty());
  });
}

// The first mean of a step fixes f.
TEST(QuantizingHop, HoldsTheDivideFactorFromItsFirstMean) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    const Made made = make(mesh);
    Reducer& reducer = *made.reducer;
    const StepCase step = some_step(2, 1);
    reducer.set_requires_all_reduce(false, "late");
    run_microbatch(reducer, step, 0, mesh.rank(), {});
    EXPECT_THROW(reducer.set_gradient_divide_factor(3.0), UsageError);
    reducer.set_requires_all_reduce(true, "late");
    run_microbatch(reducer, step, 1, mesh.rank(), {});
    reducer.finish();
    reducer.set_gradient_divide_factor(3.0);
  });
}

}  // namespace
}  // namespace hsdp
