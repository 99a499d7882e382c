#include "hsdp/tools/plan_options.h"

#include <algorithm>
#include <array>
#include <boost/program_options.hpp>
#include <charconv>
#include <cmath>
#include <sstream>
#include <string_view>
#include <utility>

#include "hsdp/error.h"
#include "hsdp/tools/safetensors_header.h"

namespace hsdp {
namespace {

namespace po = boost::program_options;

constexpr std::int64_t kMostRanks = 65536;
constexpr std::int64_t kMostElements = std::int64_t{1} << 50;
constexpr std::int64_t kMostLayers = 100'000;
constexpr std::int64_t kMostMicrobatches = 1'000'000;
constexpr std::int64_t kMostBucketBytes = std::int64_t{1} << 40;

constexpr const char* kUsage =
    R"(usage: hsdp_plan --safetensors FILE [FILE...] --shard S [options]
       hsdp_plan --elements N [--layers L] --shard S [options]

What each rank of a mesh holds of a model, and what it sends in a step.

exit status: 0, or 2 for a command line or file that cannot be used

)";

po::options_description described_options() {
  const auto text = [](const char* name) { return po::value<std::string>()->value_name(name); };
  const auto word = [](const char* name, const char* standard) {
    return po::value<std::string>()->value_name(name)->default_value(standard);
  };
  po::options_description options("options", 78, 40);
  options.add_options()("safetensors",
                        po::value<std::vector<std::string>>()->multitoken()->value_name("FILE"),
                        "shapes and dtypes from the headers of these files")(
      "elements", text("N"), "instead: so many elements, 7e9 say,")(
      "layers", word("L", "1"), "in so many parameters of one size")(
      "dtype", text("DTYPE"),
      "of parameters and gradients: f32, bf16 or f16; default: bf16, of "
      "files their own")("replicate", word("R", "1"), "replicas of the model")(
      "shard", word("S", "1"), "ranks that a replica is sharded over")(
      "stage", word("0-3", "2"), "of ZeRO: 0 shards gradient sums only")(
      "shard-over", word("shard|mesh", "shard"), "what optimizer states are cut over")(
      "hop", word("plain|loco", "plain"), "between replicas")(
      "reduce-dtype", text("DTYPE"), "on the wire of the shard group; default: the gradients'")(
      "replica-dtype", text("DTYPE"), "between replicas; default: as in the shard group")(
      "bucket-bytes", text("N"), "of the Reducer; default: its own")(
      "device", word("cuda|cpu", "cuda"), "of the mesh")("microbatches", word("M", "1"),
                                                         "of a step")(
      "shard-bandwidth", text("RATE"), "of a rank in its shard group: 450GB/s or 400Gb/s")(
      "replica-bandwidth", text("RATE"), "of a rank between replicas")(
      "json", po::bool_switch(), "print JSON instead of the tables")(
      "help,h", po::bool_switch(), "print this text")("version", po::bool_switch(),
                                                      "print the version");
  return options;
}

po::variables_map parse(int argc, const char* const* argv) {
  po::variables_map values;
  try {
    // No abbreviations: --s could become another option's.
    const auto style =
        po::command_line_style::default_style & ~po::command_line_style::allow_guessing;
    po::store(po::command_line_parser(argc, argv)
                  .options(described_options())
                  .positional({})
                  .style(style)
                  .run(),
              values);
    po::notify(values);
  } catch (const po::error& error) {
    throw UsageError(std::string(error.what()) + "; see hsdp_plan --help");
  }
  return values;
}

[[noreturn]] void refuse(const std::string& option, const std::string& expected,
                         const std::string& got) {
  throw UsageError({.where = "--" + option, .expected = expected, .got = "'" + got + "'"});
}

std::optional<double> leading_number(std::string_view text, std::string_view& rest) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  rest = text.substr(static_cast<std::size_t>(end - text.data()));
  return number;
}

// 7000000000 or 7e9.
std::int64_t whole(const po::variables_map& values, const std::string& option, std::int64_t least,
                   std::int64_t most) {
  const auto& text = values[option].as<std::string>();
  std::string_view rest = text;
  const std::optional<double> number = leading_number(text, rest);
  if (!number || !rest.empty() || !(*number >= static_cast<double>(least)) ||
      !(*number <= static_cast<double>(most)) || *number != std::floor(*number)) {
    refuse(option, "a whole number from " + std::to_string(least) + " to " + std::to_string(most),
           text);
  }
  return static_cast<std::int64_t>(*number);
}

template <typename Value, std::size_t count>
Value choose(const po::variables_map& values, const std::string& option,
             const std::array<std::pair<std::string_view, Value>, count>& choices) {
  const auto& text = values[option].as<std::string>();
  std::string accepted;
  for (const auto& [word, value] : choices) {
    if (text == word) return value;
    accepted += (accepted.empty() ? "" : ", ") + std::string(word);
  }
  refuse(option, "one of " + accepted, text);
}

std::optional<Dtype> dtype(const po::variables_map& values, const std::string& option) {
  static constexpr std::array<std::pair<std::string_view, Dtype>, 3> kDtypes{
      {{"f32", Dtype::kF32}, {"bf16", Dtype::kBf16}, {"f16", Dtype::kF16}}};
  if (values.count(option) == 0) return std::nullopt;
  return choose(values, option, kDtypes);
}

// In bytes a second: decimal prefixes, B for bytes and b for bits, as NCCL and networks count.
std::optional<double> bandwidth(const po::variables_map& values, const std::string& option) {
  constexpr std::array<std::pair<std::string_view, double>, 8> kUnits{{{"TB/s", 1e12},
                                                                       {"GB/s", 1e9},
                                                                       {"MB/s", 1e6},
                                                                       {"B/s", 1.0},
                                                                       {"Tb/s", 1e12 / 8},
                                                                       {"Gb/s", 1e9 / 8},
                                                                       {"Mb/s", 1e6 / 8},
                                                                       {"b/s", 1.0 / 8}}};
  if (values.count(option) == 0) return std::nullopt;
  const auto& text = values[option].as<std::string>();
  std::string_view unit = text;
  const std::optional<double> number = leading_number(text, unit);
  const auto* const found =
      std::ranges::find(kUnits, unit, &std::pair<std::string_view, double>::first);
  if (!number || found == kUnits.end() || !std::isfinite(*number) || !(*number > 0)) {
    refuse(option, "a rate above 0 with its unit, as 50GB/s or 400Gb/s", text);
  }
  return *number * found->second;
}

std::vector<ParameterSpec> parameters(const po::variables_map& values) {
  const bool has_files = values.count("safetensors") != 0;
  if (has_files == (values.count("elements") != 0)) {
    throw UsageError({.where = "command line",
                      .expected = "--safetensors or --elements",
                      .got = has_files ? "both" : "neither",
                      .remedy = "see hsdp_plan --help"});
  }
  const std::optional<Dtype> given = dtype(values, "dtype");
  std::vector<ParameterSpec> all;
  if (has_files) {
    for (const std::string& path : values["safetensors"].as<std::vector<std::string>>()) {
      read_safetensors(path, all);
    }
    for (ParameterSpec& one : all) one.dtype = given.value_or(one.dtype);
    if (!all.empty()) return all;
    throw UsageError({.where = "--safetensors",
                      .expected = "tensors of floating point",
                      .got = "none",
                      .remedy = "give the files of a model"});
  }
  const std::int64_t elements = whole(values, "elements", 1, kMostElements);
  const std::int64_t layers = whole(values, "layers", 1, std::min(kMostLayers, elements));
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const std::int64_t begin = elements / layers * layer + std::min(layer, elements % layers);
    const std::int64_t end =
        elements / layers * (layer + 1) + std::min(layer + 1, elements % layers);
    all.push_back({.name = "layers." + std::to_string(layer) + ".weight",
                   .shape = {end - begin},
                   .dtype = given.value_or(Dtype::kBf16)});
  }
  return all;
}

}  // namespace

PlanOptions parse_plan_options(int argc, const char* const* argv) {
  const po::variables_map values = parse(argc, argv);
  PlanOptions options;
  if (values["help"].as<bool>()) {
    std::ostringstream text;
    text << kUsage << described_options();
    options.message = text.str();
    return options;
  }
  if (values["version"].as<bool>()) {
    options.message = "hsdp_plan " HSDP_VERSION "\n";
    return options;
  }
  options.parameters = parameters(values);
  options.shard = static_cast<int>(whole(values, "shard", 1, kMostRanks));
  options.replicate = static_cast<int>(whole(values, "replicate", 1, kMostRanks / options.shard));
  options.stage = static_cast<int>(whole(values, "stage", 0, 3));
  options.loco =
      choose(values, "hop",
             std::array<std::pair<std::string_view, bool>, 2>{{{"plain", false}, {"loco", true}}});
  options.reducer.shard_over =
      choose(values, "shard-over",
             std::array<std::pair<std::string_view, ShardOver>, 2>{
                 {{"shard", ShardOver::kShard}, {"mesh", ShardOver::kMesh}}});
  options.device = choose(values, "device",
                          std::array<std::pair<std::string_view, DeviceType>, 2>{
                              {{"cuda", DeviceType::kCuda}, {"cpu", DeviceType::kHost}}});
  options.reducer.reduce_dtype = dtype(values, "reduce-dtype");
  options.reducer.replica_dtype = dtype(values, "replica-dtype");
  if (values.count("bucket-bytes") != 0) {
    options.reducer.bucket_bytes = whole(values, "bucket-bytes", 1, kMostBucketBytes);
  }
  options.microbatches = whole(values, "microbatches", 1, kMostMicrobatches);
  options.shard_bandwidth = bandwidth(values, "shard-bandwidth");
  options.replica_bandwidth = bandwidth(values, "replica-bandwidth");
  options.json = values["json"].as<bool>();
  return options;
}

}  // namespace hsdp
