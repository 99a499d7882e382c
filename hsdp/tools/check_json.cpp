#include "hsdp/tools/check_json.h"

#include <cmath>

#include "hsdp/tools/check_facts.h"

namespace hsdp {
namespace {

using nlohmann::ordered_json;

constexpr int kJsonSchema = 1;

// JSON has no NaN or infinities: write them as text.
ordered_json number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

ordered_json to_json(const std::filesystem::path& path, const SnapshotInfo& info) {
  return {{"path", path.string()},
          {"id", info.id},
          {"reducer", info.reducer},
          {"step", info.step},
          {"replicate_size", info.replicate_size},
          {"shard_size", info.shard_size},
          {"microbatch_count", info.microbatch_count},
          {"divide_factor", info.divide_factor},
          {"loss_scale", info.loss_scale},
          {"replica_dtype", replica_dtype_text(info)},
          {"replica_hop", info.replica_hop},
          {"quantizes", info.quantizes},
          {"reduction", info.reduction},
          {"layout", info.layout},
          {"engine", info.engine},
          {"partial", info.partial}};
}

ordered_json coordinates(std::int64_t index, const Shape& shape) {
  Shape position(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    position[i] = index % shape[i];
    index /= shape[i];
  }
  return position;
}

ordered_json worst_element(const ParameterDifference& p) {
  if (p.worst.index < 0) return nullptr;
  return {{"index", p.worst.index},
          {"position", coordinates(p.worst.index, p.shape)},
          {"replica", p.worst.replica},
          {"a", number(p.worst.a)},
          {"b", number(p.worst.b)}};
}

ordered_json to_json(const ParameterDifference& p, bool detail) {
  ordered_json result{{"name", p.name},
                      {"shape", p.shape},
                      {"count", p.count},
                      {"coarsest_dtype", name(p.coarsest)},
                      {"verdict", to_string(p.verdict)},
                      {"limit", p.limit},
                      {"max_absolute", number(p.max_absolute)},
                      {"max_relative", number(p.max_relative)},
                      {"relative_l2", number(p.relative_l2)},
                      {"max_ulp", number(p.max_ulp)},
                      {"cosine", number(p.cosine)},
                      {"max_b", number(p.max_b)},
                      {"nonfinite_a", p.nonfinite_a},
                      {"nonfinite_b", p.nonfinite_b},
                      {"nonfinite_mismatches", p.nonfinite_mismatches},
                      {"failing", p.failing},
                      {"worst", worst_element(p)}};
  if (!detail) return result;
  ordered_json max = ordered_json::array();
  ordered_json rms = ordered_json::array();
  for (const HeatCell& cell : p.heat) {
    max.push_back(static_cast<float>(cell.max));
    rms.push_back(static_cast<float>(cell.root_mean_square));
  }
  result["heat"] = {{"max", max}, {"rms", rms}};
  result["histogram"] = {{"first_exponent", p.histogram.first_exponent},
                         {"counts", p.histogram.counts},
                         {"zero_count", p.histogram.zero_count}};
  return result;
}

ordered_json head(const char* mode, const std::string& verdict, ExitStatus status,
                  const std::string& summary) {
  return {{"schema", kJsonSchema},   {"tool", "hsdp_check"},
          {"version", HSDP_VERSION}, {"mode", mode},
          {"verdict", verdict},      {"exit_status", static_cast<int>(status)},
          {"summary", summary}};
}

}  // namespace

ordered_json to_json(const Comparison& comparison, bool detail) {
  ordered_json result = head("compare", to_string(comparison.verdict),
                             exit_status(comparison.verdict), verdict_text(comparison));
  result["criterion"] = {{"kind", to_string(comparison.criterion)},
                         {"text", criterion_text(comparison)},
                         {"rtol", comparison.rtol},
                         {"atol", comparison.atol},
                         {"ulp", comparison.ulp}};
  result["a"] = to_json(comparison.path_a, comparison.a);
  result["b"] = to_json(comparison.path_b, comparison.b);
  result["element_count"] = total_count(comparison);
  result["different_count"] = different_count(comparison);
  result["parameters"] = ordered_json::array();
  for (const auto& parameter : comparison.parameters) {
    result["parameters"].push_back(to_json(parameter, detail));
  }
  return result;
}

ordered_json to_json(const Validation& validation) {
  const bool sound = validation.sound();
  ordered_json result =
      head("validate", sound ? "sound" : "unsound",
           sound ? ExitStatus::kSame : ExitStatus::kDifferent, verdict_text(validation));
  result["a"] = to_json(validation.path, validation.info);
  result["copy_count"] = validation.copy_count;
  result["parameters"] = ordered_json::array();
  for (const ParameterCheck& p : validation.parameters) {
    ordered_json unequal = nullptr;
    if (p.first_unequal >= 0) unequal = {{"copy", p.unequal_copy}, {"index", p.first_unequal}};
    ordered_json first_nonfinite = nullptr;
    if (p.first_nonfinite >= 0) first_nonfinite = p.first_nonfinite;
    result["parameters"].push_back({{"name", p.name},
                                    {"shape", p.shape},
                                    {"count", p.count},
                                    {"verdict", p.sound() ? "sound" : "unsound"},
                                    {"max_absolute", number(p.max_absolute)},
                                    {"norm", number(p.norm)},
                                    {"nonfinite", p.nonfinite},
                                    {"first_nonfinite", first_nonfinite},
                                    {"unequal", unequal}});
  }
  return result;
}

ordered_json error_to_json(const std::string& message) {
  return head("error", "cannot tell", ExitStatus::kCannotTell, message);
}

std::string dump(const ordered_json& findings, int indent) {
  return findings.dump(indent, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace hsdp
