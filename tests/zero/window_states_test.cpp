// What may happen in and around a window: calls out of order, drops, flags, memory, and counts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/reducer_internal.h"
#include "tests/support/reducer_step.h"
#include "zero/coalesced_window.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using zero::CoalescedWindow;

constexpr std::int64_t kCount = 10;

// A Reducer with one parameter, and its gradient of ones.
struct OneParameter {
  explicit OneParameter(const Mesh& mesh, const ReducerOptions& options = {})
      : reducer(mesh, options) {
    reducer.register_parameter({.name = "w", .shape = {kCount}});
  }
  void pass() { reducer.gradient_ready("w", ones.view()); }
  void expect(float value) { EXPECT_THAT(values_of(reducer.shard("w")), Each(value)); }
  // A step that is right whatever came before it.
  void expect_clean_step() {
    run_window(2);
    expect(2);
  }
  void run_window(int pass_count, const WindowOptions& options = {}) {
    CoalescedWindow window({&reducer}, options);
    for (int k = 0; k < pass_count; ++k) pass();
    window.end();
  }
  void run_microbatch(const MicrobatchOptions& options = {}) {
    Microbatch open(reducer, options);
    pass();
    open.end();
  }

  Reducer reducer;
  StoredGradient ones{Values(kCount, 1.0F), {kCount}, Dtype::kF32};
};

std::string refusal(const std::function<void()>& call) {
  const auto error = caught<UsageError>(call);
  return error ? error->what() : "not refused";
}

// A step that is dropped. `is_bad`: this rank did it and keeps its own error, an E; the other ranks
// are told. Returns the text.
template <class E>
std::string dropped(bool is_bad, const std::function<void()>& step) {
  try {
    step();
    ADD_FAILURE() << "no step was dropped";
  } catch (const StepAbortedError& error) {
    EXPECT_FALSE(is_bad) << error.what();
    return error.what();
  } catch (const E& error) {
    EXPECT_TRUE(is_bad) << error.what();
    return error.what();
  }
  return {};
}

// Several Reducers in one window.
struct Several {
  Several(const Mesh& mesh, int count, const ReducerOptions& options = {}) {
    for (int k = 0; k < count; ++k) {
      reducers.push_back(&all.emplace_back(mesh, options).reducer);
    }
  }
  void run_window(int pass_count) {
    CoalescedWindow window(reducers);
    pass(pass_count);
    window.end();
    for (OneParameter& one : all) one.expect(static_cast<float>(pass_count));
  }
  void pass(int count = 1) {
    for (OneParameter& one : all) {
      for (int k = 0; k < count; ++k) one.pass();
    }
  }

  std::deque<OneParameter> all;  // in a deque, as they must not move
  std::vector<Reducer*> reducers;
};

TEST(Window, MicrobatchesInsideOnlyDelimit) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    OneParameter one(mesh);
    CoalescedWindow window({&one.reducer});
    for (int k = 0; k < 3; ++k) one.run_microbatch({.last = k == 0});
    one.pass();  // a pass outside the microbatches, too
    EXPECT_TRUE(one.reducer.state().window_open);
    window.end();
    one.expect(4);
    const ReducerStats stats = one.reducer.stats();
    EXPECT_EQ(stats.microbatch_count, 1);
    EXPECT_EQ(stats.step_count, 1);
  });
}

// A window sends nothing until its end, and runs the collectives of one microbatch.
TEST(Window, CostsTheSameHoweverManyPasses) {
  std::vector<ReducerStats> stats;
  for (const int pass_count : {1, 2, 4, 8}) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      OneParameter one(mesh, {.bucket_bytes = 16});
      one.reducer.prepare();
      const std::int64_t before = one.reducer.stats().control_message_count;
      CoalescedWindow window({&one.reducer});
      for (int k = 0; k < pass_count * (1 + mesh.rank()); ++k) one.pass();
      EXPECT_EQ(one.reducer.stats().control_message_count, before);
      EXPECT_EQ(one.reducer.stats().reduce_scatter_count, 0);
      window.end();
      static_cast<void>(one.reducer.shard("w"));
      if (mesh.rank() == 0) stats.push_back(one.reducer.stats());
      if (mesh.rank() == 0) stats.back().control_message_count -= before;
    });
    EXPECT_EQ(stats.back().reduce_scatter_count, stats.back().bucket_count);
    EXPECT_EQ(stats.back().all_reduce_count, stats.back().bucket_count);
    EXPECT_EQ(stats.back().control_message_count, 2) << "a word and the bit for found_inf";
    EXPECT_EQ(stats.back().shard_hop_bytes, stats.front().shard_hop_bytes);
    EXPECT_EQ(stats.back().replica_hop_bytes, stats.front().replica_hop_bytes);
  }
}

TEST(Window, RefusesCallsThatAreForOutside) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    OneParameter one(mesh);
    Reducer& reducer = one.reducer;
    {
      CoalescedWindow window({&reducer});
      one.pass();
      const auto inside = HasSubstr("outside of a window");
      EXPECT_THAT(refusal([&] { reducer.begin_window(); }), inside);
      EXPECT_THAT(refusal([&] { CoalescedWindow nested({&reducer}); }), inside);
      EXPECT_THAT(refusal([&] { reducer.begin_step(); }), inside);
      EXPECT_THAT(refusal([&] { reducer.finish(); }), inside);
      EXPECT_THAT(refusal([&] { reducer.discard(); }), inside);
      EXPECT_THAT(refusal([&] { static_cast<void>(reducer.shard("w")); }), inside);
      EXPECT_THAT(refusal([&] { static_cast<void>(reducer.grad_norm()); }), inside);
      EXPECT_THAT(refusal([&] { reducer.release_memory(); }), inside);
      EXPECT_THAT(refusal([&] { reducer.set_gradient_divide_factor(2); }), inside);
      EXPECT_THAT(refusal([&] { reducer.set_partial_sync(Sync::kNone); }), inside);
      EXPECT_THAT(refusal([&] { reducer.end_microbatch(); }), HasSubstr("open in the window"));
      {
        Microbatch open(reducer);
        EXPECT_THAT(refusal([&] { reducer.begin_microbatch(); }), HasSubstr("no open microbatch"));
        EXPECT_THAT(refusal([&] { reducer.set_requires_gradient_sync(false); }),
                    HasSubstr("no open microbatch"));
        open.end();
      }
      window.end();  // the refused calls have changed nothing
      EXPECT_THAT(refusal([&] { window.end(); }), HasSubstr("one end()"));
    }
    one.expect(1);
    EXPECT_THAT(refusal([&] { reducer.end_window(); }), HasSubstr("an open window"));
    EXPECT_THAT(refusal([&] { reducer.begin_window({.backwards = 0}); }), HasSubstr("at least 1"));
    EXPECT_THAT(refusal([&] { reducer.set_partial_sync(Sync::kAll); }),
                HasSubstr("\"shard\" or \"none\""));
    reducer.set_requires_gradient_sync(false);
    EXPECT_THAT(refusal([&] { reducer.begin_window({.last = true}); }),
                HasSubstr("gradient sync on"));
    reducer.set_requires_gradient_sync(true);
    one.expect_clean_step();
  });
}

TEST(Window, RefusesReducersThatAreNoneOrTwice) {
  run_mesh({1, 1}, [](const Mesh& mesh) {
    OneParameter one(mesh);
    EXPECT_THAT(refusal([] { CoalescedWindow window({}); }), HasSubstr("got none"));
    EXPECT_THAT(refusal([] { CoalescedWindow window({nullptr}); }), HasSubstr("null pointer"));
    EXPECT_THAT(refusal([&] {
                  CoalescedWindow window({&one.reducer, &one.reducer});
                }),
                HasSubstr("one twice"));
    one.expect_clean_step();
  });
}

// How one rank breaks its window: `inside` throws, or the end of the window does.
struct Fault {
  std::string label;
  std::function<void(OneParameter& one)> inside;
  std::string reason;  // as the other ranks are told
  WindowOptions options{};
};

std::vector<Fault> faults() {
  return {
      {"exception", [](OneParameter&) { throw std::runtime_error("own"); },
       "its block raised an exception"},
      {"abandoned", [](OneParameter& one) { one.reducer.abandon_step("no more"); }, "no more"},
      {"open_microbatch", [](OneParameter& one) { one.reducer.begin_microbatch(); },
       "every microbatch inside of the window ended"},
      {"exception_in_a_microbatch",
       [](OneParameter& one) {
         const Microbatch inside(one.reducer);
         throw std::runtime_error("own");
       },
       "raised an exception"},
      {"one_more",
       [](OneParameter& one) {
         one.pass();
         EXPECT_THAT(refusal([&] { one.pass(); }),
                     HasSubstr("at most 2 in its window, as backwards says, got one more"));
       },
       "at most 2",
       {.backwards = 2}},
      {"second_sum",
       [](OneParameter& one) { refusal([&] { one.pass(); }); },
       "one sum of its window's gradients",
       {.accumulate = Accumulate::kGrad}},
      {"missing", [](OneParameter&) {}, "a gradient for every parameter"},
      {"unknown",
       [](OneParameter& one) {
         refusal([&] { one.reducer.gradient_ready("unknown", one.ones.view()); });
       },
       "unknown"},
  };
}

class WindowFault : public testing::TestWithParam<Fault> {};

// The step is dropped on all ranks: this one keeps its own error, the other ranks are told its
// reason.
TEST_P(WindowFault, DropsTheStepOnAllRanks) {
  const Fault& fault = GetParam();
  for (const bool is_pending : {false, true}) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      OneParameter one(mesh, {.bucket_bytes = 16});
      const bool is_bad = mesh.rank() == 1;
      for (int repeat = 0; repeat < 3; ++repeat) {
        const std::string heard = dropped<std::exception>(is_bad, [&] {
          if (is_pending) one.run_window(1, {.last = false});
          CoalescedWindow window({&one.reducer}, fault.options);
          if (fault.label != "missing" || !is_bad) one.pass();
          if (is_bad) fault.inside(one);
          window.end();
          static_cast<void>(one.reducer.shard("w"));
        });
        if (!is_bad) {
          EXPECT_THAT(heard, AllOf(HasSubstr("rank 1"), HasSubstr(fault.reason)));
        }
        EXPECT_FALSE(one.reducer.state().window_open);
        one.expect_clean_step();
      }
      EXPECT_EQ(one.reducer.state().step, 5);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, WindowFault, testing::ValuesIn(faults()),
                         [](const auto& row) { return row.param.label; });

// If a rank forgets end(), all ranks are told, and later questions about the step say so too.
TEST(Window, IsLeftWithoutItsEnd) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    OneParameter one(mesh);
    {
      const CoalescedWindow window({&one.reducer});
      one.pass();
    }
    EXPECT_THAT(refusal([&] { static_cast<void>(one.reducer.grad_norm()); }),
                HasSubstr("got one that was dropped by rank " + std::to_string(mesh.rank()) +
                          " of 2: its window was left without end()"));
    one.expect_clean_step();
  });
}

TEST(Window, FlagsSetInsideAreUndone) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    OneParameter one(mesh);
    for (const bool drops : {false, true}) {
      {
        CoalescedWindow window({&one.reducer});
        for (const bool flag : {false, true, false}) {
          one.reducer.set_requires_gradient_sync(flag);
          one.run_microbatch();
        }
        if (drops) {
          one.reducer.abandon_step("dropped");
          EXPECT_NE(refusal([&] { window.end(); }), "not refused");
        } else {
          window.end();
          one.expect(3);
        }
      }
      one.run_microbatch();
      one.expect(1);
    }
  });
}

// Which sync a window runs, by `last`, flags and the partial sync; seen from what it leaves. As in
// FSDP2, with the all-reduce off and no `last` the sums stay in the shard group.
TEST(Window, SyncsAsLastAndFlagsSay) {
  struct Row {
    std::optional<bool> last;
    bool gradient_sync;
    Sync partial;
    Sync want;
    bool all_reduce = true;
  };
  const std::vector<Row> rows{{std::nullopt, true, Sync::kShard, Sync::kAll},
                              {std::nullopt, false, Sync::kShard, Sync::kNone},
                              {true, true, Sync::kNone, Sync::kAll},
                              {false, true, Sync::kShard, Sync::kShard},
                              {false, true, Sync::kNone, Sync::kNone},
                              {false, false, Sync::kShard, Sync::kNone},
                              {std::nullopt, true, Sync::kShard, Sync::kShard, false}};
  run_mesh(kSquare, [&](const Mesh& mesh) {
    for (const Row& row : rows) {
      OneParameter one(mesh);
      one.reducer.set_partial_sync(row.partial);
      one.reducer.set_requires_gradient_sync(row.gradient_sync);
      one.reducer.set_requires_all_reduce(row.all_reduce);
      one.run_window(2, {.last = row.last});
      EXPECT_EQ(one.reducer.state().pending, row.want != Sync::kAll);
      if (row.want == Sync::kShard) {
        EXPECT_EQ(one.reducer.partial_shard("w")[0], 2.0F);
      }
      if (row.want == Sync::kNone) {
        EXPECT_EQ(one.reducer.local_sum("w")[0], 2.0F);
      }
      one.reducer.finish();
      one.expect(2);
    }
  });
}

TEST(Window, LocalSumsAreReadable) {
  for (const AccumulateDtype dtype : {AccumulateDtype::kF32, AccumulateDtype::kParam}) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      Reducer reducer(mesh);
      reducer.register_parameter({.name = "w", .shape = {2, 5}, .dtype = Dtype::kBf16});
      reducer.register_parameter({.name = "later", .shape = {3}});
      const StoredGradient ones(Values(kCount, 1.0F), {2, 5}, Dtype::kBf16);
      const StoredGradient later(Values(3, 1.0F), {3}, Dtype::kF32);
      EXPECT_THAT(refusal([&] { static_cast<void>(reducer.local_sum("w")); }), HasSubstr("'w'"));
      CoalescedWindow window({&reducer}, {.backwards = 2, .accumulate_dtype = dtype});
      for (int k = 1; k <= 2; ++k) {
        reducer.gradient_ready("w", ones.view());
        EXPECT_EQ(reducer.local_sum("w"), std::vector<float>(kCount, static_cast<float>(k)));
      }
      EXPECT_THAT(refusal([&] { static_cast<void>(reducer.local_sum("later")); }),
                  HasSubstr("got none"));
      std::vector<float> two(2);
      EXPECT_THAT(refusal([&] {
                    reducer.local_sum("w", {two.data(), 2, Dtype::kF32, {}});
                  }),
                  HasSubstr("10 f32"));
      reducer.gradient_ready("later", later.view());
      window.end();
      EXPECT_THAT(refusal([&] { static_cast<void>(reducer.local_sum("w")); }), HasSubstr("none"));
    });
  }
}

TEST(Window, KeepsItsMemoryUntilItIsReleased) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 1024});
    constexpr std::int64_t kElements = 4096;
    reducer.register_parameter({.name = "w", .shape = {kElements}, .dtype = Dtype::kBf16});
    const StoredGradient gradient(Values(kElements, 1.0F), {kElements}, Dtype::kBf16);
    const auto run = [&](AccumulateDtype dtype, bool last = true) {
      CoalescedWindow window({&reducer}, {.last = last, .accumulate_dtype = dtype});
      for (int k = 0; k < 2; ++k) reducer.gradient_ready("w", gradient.view());
      window.end();
    };
    run(AccumulateDtype::kParam);
    const std::int64_t carry = kElements / 2 * 4;
    const std::int64_t staging = 2 * 1024;
    EXPECT_EQ(reducer.stats().accumulator_bytes, kElements * 2);
    EXPECT_EQ(reducer.stats().carry_bytes, carry);
    EXPECT_EQ(reducer.stats().staging_bytes, staging);
    EXPECT_EQ(reducer.stats().peak_resident_bytes, carry + staging + kElements * 2);
    EXPECT_EQ(reducer.stats().peak_retained_bytes, 0);
    run(AccumulateDtype::kF32);
    EXPECT_EQ(reducer.stats().accumulator_bytes, kElements * 4);
    run(AccumulateDtype::kParam);
    EXPECT_EQ(reducer.stats().accumulator_bytes, kElements * 4) << "kept, there is room";
    reducer.release_memory();
    EXPECT_EQ(reducer.stats().accumulator_bytes, 0);
    EXPECT_EQ(reducer.stats().resident_bytes, carry + staging);
    EXPECT_THAT(values_of(reducer.shard("w")), Each(2.0F));
    run(AccumulateDtype::kF32, false);
    EXPECT_THAT(refusal([&] { reducer.release_memory(); }), HasSubstr("between steps"));
    run(AccumulateDtype::kF32);
    EXPECT_THAT(values_of(reducer.shard("w")), Each(4.0F));
    // Pending local sums keep their dtype.
    reducer.set_partial_sync(Sync::kNone);
    run(AccumulateDtype::kParam, false);
    EXPECT_THAT(refusal([&] { run(AccumulateDtype::kF32); }), HasSubstr("'param'"));
    run(AccumulateDtype::kParam);
    EXPECT_THAT(values_of(reducer.shard("w")), Each(4.0F));
  });
}

TEST(Window, AccumulatesOnTheHostBesideAGpuOnly) {
  run_mesh({1, 1}, [](const Mesh& mesh) {
    EXPECT_THAT(refusal([&] { OneParameter one(mesh, {.accumulate_on = AccumulateOn::kHost}); }),
                HasSubstr("beside a GPU"));
  });
}

// Ranks disagree if one is in a window and another in a plain microbatch, or if their local sums
// differ.
TEST(Window, IsAgreedOnByAllRanks) {
  for (const bool is_dtype : {false, true}) {
    const std::vector<std::exception_ptr> errors = try_ranks(2, [&](Communicator& world) {
      const Mesh mesh(world, {.replicate = 1, .shard = 2});
      OneParameter one(mesh);
      if (is_dtype || world.rank() == 0) {
        const bool param = world.rank() == 1;
        one.run_window(
            1, {.accumulate_dtype = param ? AccumulateDtype::kParam : AccumulateDtype::kF32});
      } else {
        one.run_microbatch({.last = true});
      }
      static_cast<void>(one.reducer.shard("w"));
    });
    for (const std::exception_ptr& error : errors) {
      ASSERT_TRUE(error);
      EXPECT_THAT([&] { std::rethrow_exception(error); },
                  testing::ThrowsMessage<MismatchError>(HasSubstr(
                      is_dtype ? "'several, in f32'" : "gradients per parameter 'several")));
    }
  }
}

TEST(WindowOfSeveral, ReducesAllOfThem) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    OneParameter first(mesh);
    OneParameter second(mesh, {.reduce_dtype = Dtype::kF16});
    for (int repeat = 0; repeat < 3; ++repeat) {
      CoalescedWindow window({&first.reducer, &second.reducer});
      for (int k = 0; k < 3; ++k) first.pass();
      for (int k = 0; k <= mesh.rank(); ++k) second.pass();
      window.end();
      first.expect(3);
      second.expect(2.5F);
    }
  });
}

// If one Reducer's step cannot end on some rank, the steps of all Reducers are dropped on all
// ranks.
TEST(WindowOfSeveral, DropsAllStepsOrNone) {
  for (const std::size_t bad_one : {0U, 1U}) {
    for (const bool misses : {false, true}) {
      run_mesh(kSquare, [&](const Mesh& mesh) {
        Several two(mesh, 2);
        const bool is_bad = mesh.rank() == 2;
        try {
          CoalescedWindow window(two.reducers);
          for (OneParameter& one : two.all) {
            const bool breaks = is_bad && &one == &two.all[bad_one];
            if (!breaks || !misses) one.pass();
            if (breaks && !misses) one.reducer.begin_microbatch();  // left open
          }
          window.end();
          EXPECT_FALSE(is_bad);
        } catch (const StepAbortedError& error) {
          EXPECT_FALSE(is_bad) << error.what();
        } catch (const UsageError& error) {
          EXPECT_TRUE(is_bad) << error.what();
        }
        // What a rank did not learn in the window its next call tells it.
        for (OneParameter& one : two.all) {
          EXPECT_ANY_THROW(static_cast<void>(one.reducer.shard("w")));
          EXPECT_EQ(one.reducer.stats().step_count, 0);
        }
        for (OneParameter& one : two.all) one.expect_clean_step();
      });
    }
  }
}

// If one Reducer cannot begin, on some ranks or on all, the steps of all Reducers are dropped on
// all ranks. That includes steps that had not begun here, as other ranks are in them.
TEST(WindowOfSeveral, DropsAllStepsWhenOneCannotBegin) {
  for (const bool everywhere : {false, true}) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      Several three(mesh, 3);
      Reducer& second = *three.reducers[1];
      const bool is_bad = everywhere || mesh.rank() == 2;
      for (int repeat = 0; repeat < 3; ++repeat) {
        if (is_bad) second.set_requires_gradient_sync(false);
        const std::string heard = dropped<UsageError>(is_bad, [&] {
          CoalescedWindow window(three.reducers, {.last = true});
          three.pass();
          window.end();
          for (Reducer* const reducer : three.reducers) static_cast<void>(reducer->shard("w"));
        });
        if (is_bad) {
          EXPECT_THAT(heard, HasSubstr("gradient sync on"));
        }
        if (is_bad) second.set_requires_gradient_sync(true);
        three.run_window(2);
        for (const Reducer* const reducer : three.reducers) {
          EXPECT_EQ(reducer->state().step, 2 * repeat + 1);
        }
      }
    });
  }
}

// A rank that reads one result learns of the drop there. The drops of the other Reducers are the
// same one and are not thrown again, so all ranks continue with the same step of every Reducer.
TEST(WindowOfSeveral, ThrowsADropOnce) {
  for (const Dtype wire : {Dtype::kF32, Dtype::kF16}) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      Several two(mesh, 2, {.reduce_dtype = wire});
      for (int step = 0; step < 6; ++step) {
        if (step != 1 && step != 4) {
          two.run_window(step + 1);
          continue;
        }
        const bool is_bad = mesh.rank() == step % 4;
        const std::string heard = dropped<std::runtime_error>(is_bad, [&] {
          CoalescedWindow window(two.reducers);
          two.pass();
          if (is_bad) throw std::runtime_error("a bad batch");
          two.pass();
          window.end();
          static_cast<void>(two.reducers[0]->shard("w"));
        });
        if (is_bad) {
          EXPECT_EQ(heard, "a bad batch");
        }
      }
    });
  }
}

// That holds only within a shared window: a drop that a rank has not been told of is thrown.
TEST(WindowOfSeveral, ThrowsADropThatWasNotHeardOf) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    Several two(mesh, 2);
    const bool is_bad = mesh.rank() == 1;
    {
      CoalescedWindow window(two.reducers);
      two.pass();
      if (!is_bad) window.end();
    }
    if (!is_bad) {
      EXPECT_TRUE(caught<StepAbortedError>([&] { CoalescedWindow(two.reducers).end(); }));
    }
    two.run_window(1);
  });
}

// After a drop inside a window nothing can begin until the window ends: it would be another step
// than the one with which the other ranks continue.
TEST(Window, HoldsEverythingBackOnceItsStepIsDropped) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    OneParameter one(mesh);
    for (int repeat = 0; repeat < 2; ++repeat) {
      const bool is_bad = mesh.rank() == 0;
      const std::string heard = dropped<UsageError>(is_bad, [&] {
        CoalescedWindow window({&one.reducer});
        one.pass();
        if (is_bad) {
          one.reducer.abandon_step("a bad chunk");
          const auto held = HasSubstr("the window whose step was dropped");
          EXPECT_THAT(refusal([&] { one.reducer.begin_microbatch(); }), held);
          EXPECT_THAT(refusal([&] { one.reducer.begin_step(); }), held);
          EXPECT_THAT(refusal([&] { one.reducer.begin_window(); }), held);
          EXPECT_THAT(refusal([&] { static_cast<void>(one.reducer.shard("w")); }), held);
          EXPECT_THAT(refusal([&] { one.pass(); }), HasSubstr("an open microbatch"));
        }
        window.end();
        static_cast<void>(one.reducer.shard("w"));
      });
      if (is_bad) {
        EXPECT_THAT(heard, HasSubstr("dropped inside of it")) << "the window's end says so";
      }
      one.expect_clean_step();
    }
  });
}

// Peers pack with the headroom for the highest count of any rank. So does the rank that drops, for
// its zeros.
TEST(WindowOnF16, DropsTheStepOverReplicas) {
  for (const MeshShape shape : {MeshShape{2, 1}, kSquare, MeshShape{3, 1}}) {
    for (const bool is_window : {true, false}) {
      for (const bool is_pending : {false, true}) {
        run_mesh(shape, [&](const Mesh& mesh) {
          ReducerOptions options{.reduce_dtype = Dtype::kF16};
          if (!is_window) options.backwards = Backwards::kMany;
          OneParameter one(mesh, options);
          one.reducer.set_partial_sync(Sync::kNone);
          const auto run = [&](int pass_count, bool breaks, bool last) {
            if (is_window) {
              CoalescedWindow window({&one.reducer}, {.last = last});
              for (int k = 0; k < pass_count; ++k) one.pass();
              if (breaks) throw std::runtime_error("own");
              window.end();
            } else {
              Microbatch open(one.reducer, {.last = last});
              for (int k = 0; k < pass_count; ++k) one.pass();
              if (breaks) throw std::runtime_error("own");
              open.end();
            }
          };
          for (int repeat = 0; repeat < 3; ++repeat) {
            const bool is_bad = mesh.rank() == repeat % mesh.size();
            dropped<std::runtime_error>(is_bad, [&] {
              if (is_pending) run(3 * mesh.rank() + 1, false, false);
              run(is_bad ? 1 : 5, is_bad, true);
              static_cast<void>(one.reducer.shard("w"));
            });
            run(2, false, true);
            one.expect(2);
          }
        });
      }
    }
  }
}

TEST(Window, CountsOfHandedSumsAreChecked) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    for (const Dtype wire : {Dtype::kF32, Dtype::kF16}) {
      OneParameter one(mesh, {.reduce_dtype = wire});
      {
        CoalescedWindow window({&one.reducer}, {.accumulate = Accumulate::kGrad});
        one.pass();
        window.end(0);  // a rank without any pass
        one.expect(1);
      }
      for (const Accumulate accumulate : {Accumulate::kBuffer, Accumulate::kGrad}) {
        const bool is_buffer = accumulate == Accumulate::kBuffer;
        CoalescedWindow window({&one.reducer}, {.accumulate = accumulate});
        one.pass();
        EXPECT_THAT(refusal([&] { window.end(is_buffer ? 2 : -1); }),
                    HasSubstr("number of backward passes"));
        EXPECT_FALSE(one.reducer.state().window_open);
      }
      one.expect_clean_step();
    }
  });
}

// Without a CoalescedWindow around it, too, a window is over once end_window has thrown.
TEST(Window, IsLeftByAnEndThatThrows) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    OneParameter one(mesh);
    one.reducer.begin_window();
    EXPECT_THAT(refusal([&] { one.reducer.end_window(); }),
                AllOf(HasSubstr("reducer: end_window: expected a gradient for every parameter"),
                      HasSubstr("inside the window, or use missing=\"zero\"")));
    one.expect_clean_step();
    one.reducer.begin_window();
    ReducerInternal(one.reducer).leave_window("no more");
    one.expect_clean_step();
  });
}

// A check changes nothing: a missing gradient may still come.
TEST(Window, ACheckIsNoVerdict) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    OneParameter one(mesh);
    one.reducer.begin_window();
    EXPECT_THAT(refusal([&] { ReducerInternal(one.reducer).check_window(); }),
                HasSubstr("reducer: end_window: expected a gradient for every parameter"));
    one.pass();
    ReducerInternal(one.reducer).check_window();
    one.reducer.end_window();
    one.expect(1);
  });
}

}  // namespace
}  // namespace hsdp
