// The memory of a large model over many ranks apart from its gradients: the layout, and what a
// Reducer keeps for it. A separate program, as it replaces operator new to count the heap.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "hsdp/comm/world.h"
#include "hsdp/reducer/collector.h"

namespace {
std::atomic<std::int64_t> live_bytes{0};
}  // namespace

void* operator new(std::size_t size) {
  void* const data = std::malloc(size == 0 ? 1 : size);
  if (data == nullptr) throw std::bad_alloc();
  live_bytes += static_cast<std::int64_t>(::malloc_usable_size(data));
  return data;
}

void operator delete(void* data) noexcept {
  live_bytes -= static_cast<std::int64_t>(::malloc_usable_size(data));
  std::free(data);
}

void operator delete(void* data, std::size_t) noexcept { operator delete(data); }

namespace hsdp {
namespace {

constexpr int kRanks = 256;
constexpr std::int64_t kMostBytes = std::int64_t{10} << 20;

// A decoder of 6.7 B parameters.
void register_decoder(reducer::ParameterTable& table) {
  const auto add = [&table](const Shape& shape) {
    table.add({.name = "w" + std::to_string(table.size()), .shape = shape});
  };
  constexpr std::int64_t kWidth = 4096;
  constexpr std::int64_t kHidden = 11008;
  constexpr std::int64_t kVocabulary = 32000;
  add({kVocabulary, kWidth});
  for (int layer = 0; layer < 32; ++layer) {
    for (int projection = 0; projection < 4; ++projection) add({kWidth, kWidth});
    for (int projection = 0; projection < 2; ++projection) add({kHidden, kWidth});
    add({kWidth, kHidden});
    for (int norm = 0; norm < 2; ++norm) add({kWidth});
  }
  add({kWidth});
  add({kVocabulary, kWidth});
}

void expect_small_metadata(Communicator& world, Layout kind, Dtype wire) {
  const ReducerOptions options{
      .reduce_dtype = wire, .layout = kind, .bucket_bytes = std::int64_t{2} << 20};
  reducer::ParameterTable table(options, 1);
  register_decoder(table);
  std::int64_t before = live_bytes;
  const BucketLayout layout = table.make_layout(kRanks);
  EXPECT_GT(layout.buckets().size(), 6000U);
  EXPECT_LT(live_bytes - before, kMostBytes);

  before = live_bytes;
  reducer::GradientMemory memory(table, layout, {kRanks - 1}, {}, AccumulateOn::kDevice, {});
  EXPECT_LT(live_bytes - before, kMostBytes);

  reducer::Outcome outcome(world);
  reducer::StepAgreement agreement(world, "metadata");
  reducer::BucketPipeline pipeline({.layout = layout,
                                    .memory = memory,
                                    .outcome = outcome,
                                    .agreement = agreement,
                                    .groups = {{}, world, world, world},
                                    .hop = nullptr,
                                    .issuer = nullptr});
  before = live_bytes;
  const reducer::Collector collector({.parameters = table,
                                      .layout = layout,
                                      .memory = memory,
                                      .pipeline = pipeline,
                                      .outcome = outcome,
                                      .world = world,
                                      .device = {},
                                      .has_shard_hop = true});
  EXPECT_LT(live_bytes - before, kMostBytes);
}

TEST(Metadata, OfALargeModelOverManyRanksIsSmall) {
  Communicator world = in_process_world(1).front();
  for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
    for (const Dtype wire : {Dtype::kF32, Dtype::kBf16}) {
      SCOPED_TRACE(std::string(name(layout)) + " on " + std::string(name(wire)));
      expect_small_metadata(world, layout, wire);
    }
  }
}

constexpr int kManyParameters = 4000;
Shape small_shape(int parameter) { return {64 + parameter % 31, 48}; }

TEST(LayoutMemory, DoesNotGrowWithTheNumberOfRanks) {
  std::vector<LayoutParameter> parameters;
  for (int p = 0; p < kManyParameters; ++p) parameters.push_back({.shape = small_shape(p)});
  for (const Layout kind : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
    const auto bytes_with = [&](int ranks) {
      const std::int64_t before = live_bytes;
      const BucketLayout layout(parameters, ranks, kind, 1 << 20);
      return live_bytes - before;
    };
    // Narrow windows of whole parameters, so that more of them lie in two buckets.
    const int tenths = kind == Layout::kWhole ? 12 : 11;
    EXPECT_LT(bytes_with(kRanks), bytes_with(1) * tenths / 10) << name(kind);
  }
}

}  // namespace
}  // namespace hsdp
