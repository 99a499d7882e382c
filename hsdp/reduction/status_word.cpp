#include "hsdp/reduction/status_word.h"

#include <array>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

namespace hsdp::reduction {
namespace {

struct Field {
  std::string_view name;
  std::function<std::string(const StatusWord&)> text;
};

std::string factor_text(double factor) {
  return factor == 0 ? "the default" : nlohmann::json(factor).dump();
}

const std::array<Field, 6>& fields() {
  static const std::array<Field, 6> all{{
      {"call", [](const StatusWord& w) { return w.call; }},
      {"step", [](const StatusWord& w) { return std::to_string(w.step); }},
      {"microbatch", [](const StatusWord& w) { return std::to_string(w.microbatch); }},
      {"sync", [](const StatusWord& w) { return w.sync; }},
      {"gradient divide factor", [](const StatusWord& w) { return factor_text(w.divide_factor); }},
      {"loss scale", [](const StatusWord& w) { return nlohmann::json(w.loss_scale).dump(); }},
  }};
  return all;
}

// The value that most ranks hold; among equals the lowest rank's.
std::string majority(const std::vector<std::string>& values) {
  std::map<std::string, int> votes;
  for (const std::string& value : values) ++votes[value];
  std::string best = values.front();
  for (const std::string& value : values) {
    if (votes[value] > votes[best]) best = value;
  }
  return best;
}

}  // namespace

std::string StatusWord::encode() const {
  return nlohmann::json::array(
             {call, step, microbatch, sync, divide_factor, loss_scale, abandoned, reason})
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

StatusWord StatusWord::decode(const std::string& bytes) {
  const nlohmann::json word = nlohmann::json::parse(bytes);
  return {word.at(0).get<std::string>(),  word.at(1).get<std::int64_t>(),
          word.at(2).get<std::int64_t>(), word.at(3).get<std::string>(),
          word.at(4).get<double>(),       word.at(5).get<double>(),
          word.at(6).get<bool>(),         word.at(7).get<std::string>()};
}

std::optional<comm::Failure> find_mismatch(std::span<const StatusWord> words,
                                           std::span<const int> ranks) {
  for (const Field& field : fields()) {
    std::vector<std::string> values;
    values.reserve(words.size());
    for (const StatusWord& word : words) values.push_back(field.text(word));
    const std::string expected = majority(values);
    comm::Failure failure{comm::FailureKind::kMismatch, {}, {}};
    std::string got;
    for (std::size_t r = 0; r < words.size(); ++r) {
      if (values[r] == expected) continue;
      if (failure.ranks.empty()) {
        got = "'" + values[r] + "' on rank " + std::to_string(r) + " of " +
              std::to_string(words.size());
      }
      failure.ranks.push_back(ranks[r]);
    }
    if (failure.ranks.empty()) continue;
    failure.message = "reducer: end of microbatch " + std::to_string(words.front().microbatch) +
                      " of step " + std::to_string(words.front().step) + ": expected " +
                      std::string(field.name) + " '" + expected + "' on every rank, got " + got +
                      "; make the same calls with the same arguments on all ranks";
    return failure;
  }
  return std::nullopt;
}

std::optional<int> find_abandoned(std::span<const StatusWord> words) {
  for (std::size_t r = 0; r < words.size(); ++r) {
    if (words[r].abandoned) return static_cast<int>(r);
  }
  return std::nullopt;
}

}  // namespace hsdp::reduction
