// The command as people and scripts use it: its numbers equal those that a real run counts, and it
// refuses bad input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "hsdp/reducer_internal.h"
#include "quant/loco_hop.h"
#include "tests/support/command_outcome.h"
#include "tests/support/reducer_step.h"
#include "tests/support/temporary_directory.h"
#include "zero/adamw.h"
#include "zero/parameter_gather.h"

namespace hsdp {
namespace {

using nlohmann::json;
using test::CommandOutcome;
using test::MeshShape;
using testing::HasSubstr;
using testing::StartsWith;

const std::vector<ParameterSpec> kModel{
    {.name = "layers.0.weight", .shape = {70, 60}, .dtype = Dtype::kBf16},
    {.name = "layers.0.norm", .shape = {37}},
    {.name = "layers.1.weight", .shape = {50, 33}, .dtype = Dtype::kBf16},
    {.name = "scale", .shape = {}}};
constexpr int kMicrobatches = 3;

class HsdpPlan : public testing::Test {
 protected:
  CommandOutcome run(const std::string& arguments) {
    return test::run_command("cd '" + folder_.path().string() + "' && " HSDP_PLAN " " + arguments);
  }

  json plan(const std::string& arguments) {
    const CommandOutcome outcome = run(arguments + " --json");
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    return json::parse(outcome.output, nullptr, false);
  }

  void write(const std::string& name, const std::string& header, std::size_t data_bytes,
             std::int64_t wrong_by = 0) {
    std::ofstream file(folder_.path() / name, std::ios::binary);
    auto size = static_cast<std::uint64_t>(static_cast<std::int64_t>(header.size()) + wrong_by);
    for (int i = 0; i < 8; ++i, size >>= 8U) file.put(static_cast<char>(size & 0xffU));
    file << header << std::string(data_bytes, '\0');
  }

  // With an integer tensor, which is not a parameter.
  void write_model(const std::string& name) {
    json header{{"__metadata__", {{"format", "pt"}}}};
    std::size_t at = 0;
    const auto add = [&](const std::string& tensor, const char* dtype, const Shape& shape,
                         std::size_t size) {
      header[tensor] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {at, at + size}}};
      at += size;
    };
    for (const ParameterSpec& spec : kModel) {
      add(spec.name, spec.dtype == Dtype::kBf16 ? "BF16" : "F32", spec.shape,
          static_cast<std::size_t>(element_count(spec.shape)) * size_bytes(spec.dtype));
    }
    add("steps", "I64", {3}, 24);
    write(name, header.dump(), at);
  }

  test::TemporaryDirectory folder_;
};

struct RunCase {
  MeshShape shape;
  ShardOver over = ShardOver::kShard;
  bool loco = false;
  int stage = 2;
};

// What one rank of a real run counted in one step.
struct Counted {
  ReducerStats stats;
  std::int64_t gathered_bytes = 0;
  std::int64_t message_bytes = 0;
};

std::vector<Counted> run_step(const RunCase& row) {
  std::vector<Counted> counted(static_cast<std::size_t>(row.shape.size()));
  const std::vector<Sync> schedule(kMicrobatches, Sync::kShard);
  const test::StepCase step = test::random_step(kModel, row.shape.size(), schedule, 5);
  test::run_mesh(row.shape, [&](const Mesh& mesh) {
    ReducerOptions options{.bucket_bytes = 2048, .shard_over = row.over};
    if (row.loco) options.replica_hop = std::make_shared<quant::LocoHop>();
    Reducer reducer(mesh, options);
    test::register_all(reducer, step);
    reducer.set_partial_sync(row.stage == 1 ? Sync::kNone : Sync::kShard);
    std::vector<std::vector<std::byte>> arrays;
    std::vector<std::vector<float>> masters;
    std::vector<zero::GatheredParameter> gathered;
    std::vector<zero::AdamWParameter> sliced;
    for (const ParameterSpec& spec : kModel) {
      const std::int64_t count = element_count(spec.shape);
      arrays.emplace_back(static_cast<std::size_t>(count) * size_bytes(spec.dtype));
      masters.emplace_back(static_cast<std::size_t>(reducer.slice(spec.name).count));
      const TensorView master{masters.back().data(), std::ssize(masters.back())};
      gathered.push_back({spec.name, {arrays.back().data(), count, spec.dtype}, master});
      sliced.push_back({spec.name, master});
    }
    zero::AdamW optimizer(reducer, sliced);
    zero::ParameterGather gather(reducer, gathered);
    for (int m = 0; m < kMicrobatches; ++m) {
      test::run_microbatch(reducer, step, m, mesh.rank(), {.last = m + 1 == kMicrobatches});
    }
    Stream stream = Stream::inline_host();
    optimizer.update(stream);
    gather.start_all({});
    gather.wait_all();
    Counted& mine = counted[static_cast<std::size_t>(mesh.rank())];
    mine.stats = reducer.stats();
    mine.gathered_bytes = gather.stats().bytes;
    mine.message_bytes =
        ReducerInternal(reducer).memory_count().of(MemoryKind::kParameterGather).peak;
  });
  return counted;
}

TEST_F(HsdpPlan, HasTheNumbersOfARealRun) {
  write_model("model.safetensors");
  for (const MeshShape shape : {MeshShape{1, 4}, MeshShape{2, 2}, MeshShape{4, 1}}) {
    for (const ShardOver over : {ShardOver::kShard, ShardOver::kMesh}) {
      for (const bool loco : {false, true}) {
        for (const int stage : {1, 2}) {
          const std::string arguments =
              "--safetensors model.safetensors --device cpu --bucket-bytes 2048 --microbatches " +
              std::to_string(kMicrobatches) + " --replicate " + std::to_string(shape.replicate) +
              " --shard " + std::to_string(shape.shard) + " --shard-over " +
              std::string(word_of(over)) + " --hop " + (loco ? "loco" : "plain") + " --stage " +
              std::to_string(stage);
          SCOPED_TRACE(arguments);
          const json planned = plan(arguments);
          const json& memory = planned["memory"];
          const std::vector<Counted> counted = run_step({shape, over, loco, stage});
          const Counted& got = counted[memory["rank"].get<std::size_t>()];
          EXPECT_EQ(memory["carry_bytes"], got.stats.carry_bytes);
          EXPECT_EQ(memory["accumulator_bytes"], got.stats.accumulator_bytes);
          EXPECT_EQ(memory["staging_bytes"], got.stats.staging_bytes);
          EXPECT_EQ(memory["replica_hop_state_bytes"], got.stats.replica_hop_state_bytes);
          EXPECT_EQ(memory["optimizer_bytes"], got.stats.optimizer_bytes);
          EXPECT_EQ(memory["parameter_gather_bytes"], got.message_bytes);
          EXPECT_EQ(memory["scratch_bytes"], got.stats.scratch_bytes);
          std::int64_t most = 0;
          for (const Counted& one : counted) most = std::max(most, one.stats.resident_bytes);
          EXPECT_EQ(got.stats.resident_bytes, most);
          const auto sent = [&](const char* group, const char* row) {
            if (!planned["traffic"].contains(group)) return std::int64_t{0};
            const json& message = planned["traffic"][group][row];
            return message["times"].get<std::int64_t>() * message["bytes"].get<std::int64_t>();
          };
          EXPECT_EQ(sent("shard", "shard_hop"), got.stats.shard_hop_bytes);
          EXPECT_EQ(sent("replica", "replica_hop"), got.stats.replica_hop_bytes);
          if (shape.shard > 1) {
            EXPECT_EQ(sent("shard", "gather"), got.gathered_bytes);
          }
        }
      }
    }
  }
}

TEST_F(HsdpPlan, ShardsParametersAtStage3AndNothingAtStage0) {
  const std::string model = "--elements 8000 --layers 4 --shard 4 --device cpu --stage ";
  const json whole = plan(model + "0")["memory"];
  EXPECT_EQ(whole["parameters"], 16000);
  EXPECT_EQ(whole["gradients"], 16000);
  EXPECT_EQ(whole["optimizer_bytes"], 8 * 8000);
  EXPECT_EQ(whole["masters"], 4 * 8000);
  EXPECT_EQ(whole["gathered"], 0);
  const json sliced = plan(model + "3 --microbatches 5");
  EXPECT_EQ(sliced["memory"]["parameters"], 0) << "gathers read masters";
  EXPECT_EQ(plan(model + "3 --dtype f32")["memory"]["parameters"], 8000);
  const json parts = plan(model + "3 --replicate 2 --shard-over mesh")["memory"];
  EXPECT_EQ(parts["parameters"], 4000) << "and here slices, of which the rank has a part's masters";
  EXPECT_EQ(sliced["memory"]["gradients"], 0);
  EXPECT_EQ(sliced["memory"]["masters"], 8000);
  EXPECT_EQ(sliced["memory"]["gathered"], 2 * 2 * 2000) << "two of four layers";
  EXPECT_EQ(sliced["traffic"]["shard"]["gather"]["times"], 10);
  EXPECT_EQ(sliced["traffic"]["shard"]["gather"]["bytes"], 16000);
}

TEST_F(HsdpPlan, DividesWhatLeavesARankByTheBandwidth) {
  const std::string model = "--elements 1024000 --replicate 2 --shard 4 --device cpu ";
  const json rates =
      plan(model + "--shard-bandwidth 3.072MB/s --replica-bandwidth 4.096Mb/s")["traffic"];
  const json& reduced = rates["shard"]["shard_hop"];
  EXPECT_EQ(reduced["bytes"], 2048000);
  EXPECT_EQ(reduced["sent_bytes"], 1536000);
  EXPECT_DOUBLE_EQ(reduced["seconds"].get<double>(), 0.5);
  const json& hop = rates["replica"]["replica_hop"];
  EXPECT_EQ(hop["bytes"], 1024000) << "both halves of a quarter";
  EXPECT_EQ(hop["sent_bytes"], 512000);
  EXPECT_DOUBLE_EQ(hop["seconds"].get<double>(), 1.0);
  EXPECT_TRUE(plan(model)["traffic"]["shard"]["shard_hop"]["seconds"].is_null());
}

TEST_F(HsdpPlan, PrintsTables) {
  const CommandOutcome outcome =
      run("--elements 7e9 --layers 32 --replicate 2 --shard 8 --shard-bandwidth 100GB/s");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.output,
              StartsWith("7,000,000,000 elements in 32 parameters on 2 x 8 ranks (replicate x "
                         "shard), stage 2, plain hop, 1 microbatch\n\n"));
  EXPECT_THAT(outcome.output, HasSubstr("  parameters              14,000,000,000  13.039\n"));
  EXPECT_THAT(outcome.output,
              HasSubstr("of rank 0, which holds most; the least that one holds is"));
  EXPECT_THAT(outcome.output, HasSubstr("12,250,000,000    0.122\n"));
  EXPECT_THAT(run("--help").output, HasSubstr("--replica-bandwidth RATE"));
  EXPECT_THAT(run("--version").output, StartsWith("hsdp_plan 0."));
}

// A command and the tables that it prints.
TEST_F(HsdpPlan, PrintsWhatItsPageShows) {
  std::ifstream file(HSDP_PLAN_PAGE);
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  const std::string prompt = "\n    hsdp_plan ";
  const std::size_t begin = page.find(prompt);
  ASSERT_NE(begin, std::string::npos);
  const std::size_t arguments = begin + prompt.size();
  const CommandOutcome outcome =
      run(page.substr(arguments, page.find('\n', arguments) - arguments));
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  std::istringstream lines(outcome.output);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    EXPECT_THAT(page, HasSubstr(line.empty() ? "\n\n" : "\n    " + line + "\n"));
  }
  EXPECT_GT(count, 10);
}

TEST_F(HsdpPlan, RefusesWhatIsNoCommandLine) {
  const auto refuses = [this](const std::string& arguments, const std::string& text) {
    const CommandOutcome outcome = run(arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_THAT(outcome.output, StartsWith("hsdp_plan: " + text)) << arguments;
  };
  refuses("--shard 2", "command line: expected --safetensors or --elements, got neither");
  refuses("--elements 1 --safetensors x", "command line: expected --safetensors or --elements");
  refuses("--elements 7.5", "--elements: expected a whole number from 1 to 1125899906842624");
  refuses("--elements 1e30", "--elements: expected a whole number");
  refuses("--elements nan", "--elements: expected a whole number");
  refuses("--elements 5 --layers 6", "--layers: expected a whole number from 1 to 5, got '6'");
  refuses("--elements 5 --shard 0", "--shard: expected a whole number from 1 to 65536");
  refuses("--elements 5 --shard 4 --replicate 16385", "--replicate: expected a whole number");
  refuses("--elements 5 --stage 4", "--stage: expected a whole number from 0 to 3, got '4'");
  refuses("--elements 5 --dtype f64", "--dtype: expected one of f32, bf16, f16, got 'f64'");
  refuses("--elements 5 --hop fast", "--hop: expected one of plain, loco, got 'fast'");
  for (const char* rate : {"5", "5gb/s", "0GB/s", "-1GB/s", "infGB/s", "GB/s", "1e999GB/s"}) {
    refuses(std::string("--elements 5 --shard-bandwidth=") + rate,
            "--shard-bandwidth: expected a rate above 0 with its unit, as 50GB/s or 400Gb/s");
  }
  refuses("--elements 7e9 --bucket-bytes 1",
          "bucket layout: expected at most 1048576 buckets, got");
  refuses("--elements 5 --shar 2", "unrecognised option '--shar'");
}

TEST_F(HsdpPlan, RefusesHostileFiles) {
  const auto refuses = [this](const std::string& text) {
    const CommandOutcome outcome = run("--safetensors f");
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    EXPECT_THAT(outcome.output, StartsWith("hsdp_plan: --safetensors")) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(text));
  };
  refuses("expected a file, got none");
  std::ofstream(folder_.path() / "f") << "short";
  refuses("expected the size of a header, got a file that is shorter or unreadable");
  write("f", "{}", 0, 1);
  refuses("expected a header of at most 2 bytes, got 3");
  write("f", "{}", 0, -3);
  refuses("expected a header of at most 2 bytes, got 18446744073709551615");
  write("f", "{]", 0);
  refuses("expected a header in JSON, got other bytes");
  write("f", "[1]", 0);
  refuses("expected a header in JSON, got other bytes");
  write("f", std::string(1000000, '['), 0);
  refuses("one that nests deeper");
  write("f", R"({"a": 1})", 0);
  refuses("expected a dtype of each tensor, got a tensor without");
  const auto tensor = [](const std::string& shape, const std::string& offsets) {
    return R"({"a": {"dtype": "F32", "shape": )" + shape + R"(, "data_offsets": )" + offsets + "}}";
  };
  write("f", R"({"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}})", 1);
  refuses("expected gradients in F32, BF16, F16 or F64, got F8_E4M3");
  write("f", tensor("4", "[0, 4]"), 4);
  refuses("expected a list 'shape' of each tensor, got a tensor without");
  write("f", tensor("[-1]", "[0, 4]"), 4);
  refuses("expected sizes of at least 0, got other values");
  write("f", tensor("[1]", "[0]"), 4);
  refuses("expected two data_offsets, got 1");
  for (const char* offsets : {"[0, 8]", "[4, 0]", "[4, 8]", "[0, 3]"}) {
    write("f", tensor("[1]", offsets), 4);
    refuses("expected tensors that lie in its 4 bytes of data, got 'a', which does not");
  }
  write("f", tensor("[4294967296, 4294967296]", "[0, 0]"), 4);
  refuses("got 'a', which does not");
  write("f", R"({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}})", 8);
  refuses("expected tensors of floating point, got none");
  write("f", tensor("[1]", "[0, 4]"), 4);
  std::filesystem::copy_file(folder_.path() / "f", folder_.path() / "again");
  const CommandOutcome twice = run("--safetensors f again");
  EXPECT_EQ(twice.status, 2);
  EXPECT_THAT(twice.output, HasSubstr("parameter 'a': expected a new name, got one registered"));
}

}  // namespace
}  // namespace hsdp
