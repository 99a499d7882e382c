#include "hsdp/reducer/status_word.h"

#include <array>
#include <charconv>
#include <functional>
#include <iterator>
#include <map>
#include <sstream>

namespace hsdp::reducer {
namespace {

struct Field {
  std::string_view name;
  std::function<std::string(const StatusWord&)> text;
};

// The shortest text that gives the same number back.
std::string number_text(double number) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

double number(const std::string& text) {
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

std::string factor_text(double factor) { return factor == 0 ? "the default" : number_text(factor); }

const std::array<Field, 6>& fields() {
  static const std::array<Field, 6> all{{
      {"call", [](const StatusWord& w) { return w.call; }},
      {"step", [](const StatusWord& w) { return std::to_string(w.step); }},
      {"microbatch", [](const StatusWord& w) { return std::to_string(w.microbatch); }},
      {"sync", [](const StatusWord& w) { return w.sync; }},
      {"gradient divide factor", [](const StatusWord& w) { return factor_text(w.divide_factor); }},
      {"loss scale", [](const StatusWord& w) { return number_text(w.loss_scale); }},
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

// A line for each field, the reason last: it may have several.
std::string StatusWord::encode() const {
  std::string lines;
  for (const std::string& field :
       {call, std::to_string(step), std::to_string(microbatch), sync, number_text(divide_factor),
        number_text(loss_scale), std::to_string(static_cast<int>(abandoned))}) {
    lines += field + '\n';
  }
  return lines + reason;
}

StatusWord StatusWord::decode(const std::string& bytes) {
  std::istringstream stream(bytes);
  const auto line = [&stream] {
    std::string text;
    std::getline(stream, text);
    return text;
  };
  StatusWord word;
  word.call = line();
  word.step = std::stoll(line());
  word.microbatch = std::stoll(line());
  word.sync = line();
  word.divide_factor = number(line());
  word.loss_scale = number(line());
  word.abandoned = line() == "1";
  word.reason.assign(std::istreambuf_iterator<char>(stream), {});
  return word;
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

}  // namespace hsdp::reducer
