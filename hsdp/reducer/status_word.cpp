#include "hsdp/reducer/status_word.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <map>
#include <sstream>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

struct Field {
  std::string name;
  std::string remedy{};                                       // empty: that of all fields
  std::function<std::string(const std::string&)> shown = {};  // the text for errors
};

constexpr const char* kPartyRemedy =
    "give it the same settings and make the same calls on every rank";
constexpr const char* kDigestRemedy =
    "give it the same settings and make the same calls on every rank (# is a digest of more that "
    "has to be the same)";
// Most callers pass `last`.
constexpr const char* kSyncRemedy =
    "give the same last= (True is sync 'all', False 'shard' or 'none') or the same sync= on every "
    "rank; ranks with different numbers of batches need hsdp.uneven, or has_batch in C++";
constexpr const char* kUnnamedParty = "an optimizer or replica hop";

std::string sync_text(char sync) {
  return sync == '0' + static_cast<int>(Sync::kNone)    ? "none"
         : sync == '0' + static_cast<int>(Sync::kShard) ? "shard"
                                                        : "all";
}

// "shard all none": one word a group.
std::string syncs_text(const std::string& syncs) {
  std::string text;
  for (const char sync : syncs) text += (text.empty() ? "" : " ") + sync_text(sync);
  return text;
}

std::string hexadecimal(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += {kDigits[byte >> 4U], kDigits[byte & 15U]};
  }
  return text;
}

std::string printable(const std::string& value) {
  const bool is_text = std::ranges::all_of(value, [](char c) { return c >= ' ' && c <= '~'; });
  return is_text ? value : "0x" + hexadecimal(value);
}

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

std::string factor_text(const std::string& factor) {
  return number(factor) == 0 ? "the default" : factor;
}

std::string count_text(const std::string& count_by) {
  const auto by = static_cast<CountBy>(std::stoi(count_by));
  return by == CountBy::kNothing ? "nothing" : by == CountBy::kBatches ? "batches" : "tokens";
}

// Indices of a Saying. Sections come last.
enum Place : std::size_t {
  kCall,
  kStep,
  kMicrobatch,
  kSums,
  kDivideFactor,
  kLossScale,
  kCountBy,
  kSyncs,  // a digit for each group
  kSectionCount,
  kFirstSection,
};

// Indices of its largest numbers: the earliest step, as -step, then kGroupNumbers per group.
constexpr std::size_t kFirstGroupNumber = 1;
constexpr std::size_t kGroupNumbers = 4;

const comm::Agreement::Place& place_of(const comm::Agreement& words, std::size_t place) {
  static const comm::Agreement::Place kNobody{};
  return place < words.places.size() ? words.places[place] : kNobody;
}

// The text of the lowest rank that has one at that index.
const std::string& first_in(const comm::Agreement& words, std::size_t place) {
  return words.places.at(place).said.front().text;
}

struct Comparison {
  const comm::Agreement& words;
  std::span<const int> ranks;
  const WordNames& names;

  // The failure of the ranks that differ from most at that index.
  [[nodiscard]] std::optional<comm::Failure> of(const Field& field, std::size_t place) const;
  [[nodiscard]] std::optional<comm::Failure> of_syncs() const;
  [[nodiscard]] std::optional<comm::Failure> of_fields() const;
};

std::optional<comm::Failure> Comparison::of(const Field& field, std::size_t place) const {
  const auto& said = place_of(words, place).said;
  std::vector<std::string> values;
  values.reserve(said.size());
  for (const auto& one : said) values.push_back(field.shown ? field.shown(one.text) : one.text);
  if (std::ranges::adjacent_find(values, std::not_equal_to()) == values.end()) return std::nullopt;
  std::map<std::string, int> votes;
  for (std::size_t i = 0; i < said.size(); ++i) votes[values[i]] += said[i].count;
  // Ties go to the lowest rank.
  const std::string& expected = *std::ranges::max_element(
      values, {}, [&](const std::string& value) { return votes.at(value); });
  comm::Failure failure{comm::FailureKind::kMismatch, {}, {}};
  std::map<std::ptrdiff_t, std::string> others;  // by rank in the group
  for (std::size_t i = 0; i < said.size(); ++i) {
    if (values[i] == expected) continue;
    for (const int rank : said[i].ranks) {
      others[std::ranges::find(ranks, rank) - ranks.begin()] = values[i];
    }
  }
  for (const auto& [at, value] : others) {
    failure.ranks.push_back(ranks[static_cast<std::size_t>(at)]);
  }
  const auto& [at, value] = *others.begin();
  failure.message =
      Message{.where = names.component + ": end of " + names.microbatch + " " +
                       first_in(words, kMicrobatch) + " of step " + first_in(words, kStep),
              .expected = field.name + " '" + printable(expected) + "' on every rank",
              .got = "'" + printable(value) + "' on rank " + std::to_string(at) + " of " +
                     std::to_string(ranks.size()),
              .remedy = field.remedy.empty() ? names.remedy : field.remedy}
          .text();
  return failure;
}

std::optional<comm::Failure> Comparison::of_syncs() const {
  for (std::size_t g = 0; g < names.groups.size(); ++g) {
    const auto of_group = [g](const std::string& syncs) {
      return g < syncs.size() ? sync_text(syncs[g]) : "nothing";
    };
    if (auto failure = of({"sync of " + names.groups[g], {}, of_group}, kSyncs)) return failure;
  }
  return of({"sync", kSyncRemedy, syncs_text}, kSyncs);
}

std::optional<comm::Failure> Comparison::of_fields() const {
  const Field fields[] = {{"call"},
                          {"step"},
                          {names.microbatch},
                          {"gradients per parameter"},
                          {"gradient divide factor", {}, factor_text},
                          {"loss scale"},
                          {"divide factor counted in", {}, count_text}};
  for (std::size_t place = kCall; place < kSyncs; ++place) {
    if (auto failure = of(fields[place], place)) return failure;
  }
  return of_syncs();
}

// Cuts the text without splitting a UTF-8 character.
std::string cut_text(const std::string& text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  std::size_t size = max_bytes;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0U) == 0x80U) --size;
  return text.substr(0, size);
}

}  // namespace

comm::Saying StatusWord::saying() const {
  comm::Saying mine;
  mine.any = {dropped ? '\1' : '\0'};
  mine.most = {-step};
  if (call != kDropCall) {
    std::string syncs;
    for (const GroupPlan& group : groups) {
      syncs += static_cast<char>('0' + static_cast<int>(group.sync));
    }
    mine.equal = {call,
                  std::to_string(step),
                  std::to_string(microbatch),
                  sums,
                  number_text(divide_factor),
                  number_text(loss_scale),
                  std::to_string(static_cast<int>(count_by)),
                  syncs};
  }
  if (dropped) {
    mine.note = std::to_string(microbatch) + '\n' + cut_text(reason, kMaxReasonBytes);
  } else {
    mine.equal.emplace_back(std::to_string(sections.size()));
    mine.equal.insert(mine.equal.end(), sections.begin(), sections.end());
  }
  for (const GroupPlan& group : groups) {
    for (const std::int64_t number :
         {group.local_count, group.carry_count, static_cast<std::int64_t>(group.has_carry),
          static_cast<std::int64_t>(group.has_total)}) {
      mine.most.push_back(number);
    }
  }
  if (count != 0) {
    mine.sum.resize(static_cast<std::size_t>(replica) + 1);
    mine.sum.back() = count;
  }
  return mine;
}

std::optional<DropWord> Words::drop() const {
  if (all.note_rank < 0) return std::nullopt;
  const std::size_t line = all.note.find('\n');
  return DropWord{.rank = all.note_rank,
                  .microbatch = std::stoll(all.note.substr(0, line)),
                  .reason = all.note.substr(line + 1)};
}

std::int64_t Words::least_step() const { return -all.most.front(); }

StatusWord Words::fields() const {
  StatusWord word;
  word.call = first_in(all, kCall);
  word.step = std::stoll(first_in(all, kStep));
  word.microbatch = std::stoll(first_in(all, kMicrobatch));
  word.sums = first_in(all, kSums);
  word.divide_factor = number(first_in(all, kDivideFactor));
  word.loss_scale = number(first_in(all, kLossScale));
  word.count_by = static_cast<CountBy>(std::stoi(first_in(all, kCountBy)));
  // Of a rank that sends, if there is one.
  std::string syncs;
  for (const auto& said : all.places[kSyncs].said) {
    if (syncs.empty()) syncs = said.text;
  }
  for (std::size_t g = 0; g < syncs.size(); ++g) {
    const std::int64_t* const most = &all.most.at(kFirstGroupNumber + g * kGroupNumbers);
    word.groups.push_back({.sync = static_cast<Sync>(syncs[g] - '0'),
                           .local_count = most[0],
                           .carry_count = most[1],
                           .has_carry = most[2] != 0,
                           .has_total = most[3] != 0});
  }
  return word;
}

std::optional<StatusWord> Words::sent() const {
  if (place_of(all, kCall).said.empty()) return std::nullopt;
  StatusWord word = fields();
  return word.groups.empty() ? std::nullopt : std::optional(std::move(word));
}

bool Words::is_gone(std::size_t party) const {
  const std::size_t place = kFirstSection + party;
  return all.any.front() == '\0' && place < all.places.size() && all.places[place].said.empty();
}

bool has_digest(const comm::Agreement& words, std::size_t party) {
  return std::ranges::any_of(place_of(words, kFirstSection + party).said, [](const auto& said) {
    return said.text.find('#') != std::string::npos;
  });
}

std::optional<Mismatch> find_mismatch(const comm::Agreement& words, std::span<const int> ranks,
                                      const WordNames& names) {
  const Comparison comparison{words, ranks, names};
  if (auto failure = comparison.of_fields()) return Mismatch{*failure};
  const Field count{"number of optimizers and replica hops",
                    "make the same ones for this Reducer on every rank"};
  if (auto failure = comparison.of(count, kSectionCount)) return Mismatch{*failure};
  for (std::size_t party = 0; kFirstSection + party < words.places.size(); ++party) {
    const WordNames::Party named =
        party < names.parties.size() ? names.parties[party] : WordNames::Party{kUnnamedParty};
    Field section{named.owner, named.remedy};
    if (section.remedy.empty())
      section.remedy = has_digest(words, party) ? kDigestRemedy : kPartyRemedy;
    if (auto failure = comparison.of(section, kFirstSection + party)) {
      return Mismatch{*failure, party};
    }
  }
  return std::nullopt;
}

void show_details(comm::Agreement& words, std::size_t party, const comm::Agreement& details) {
  const auto& told = place_of(details, 0).said;
  std::vector<std::istringstream> texts;
  texts.reserve(told.size());
  for (const auto& one : told) texts.emplace_back(one.text);
  std::vector<std::string> lines(texts.size());
  while (!std::ranges::all_of(texts, [](const auto& text) { return text.eof(); })) {
    for (std::size_t i = 0; i < texts.size(); ++i) std::getline(texts[i], lines[i] = {});
    if (std::ranges::adjacent_find(lines, std::not_equal_to()) == lines.end()) continue;
    auto& said = words.places.at(kFirstSection + party).said = told;
    for (std::size_t i = 0; i < said.size(); ++i) said[i].text = lines[i];
    return;
  }
}

}  // namespace hsdp::reducer
