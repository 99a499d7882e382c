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
  std::function<std::string(const StatusWord&)> text;
  std::string remedy{};  // where it is not that of all fields
};

constexpr const char* kPartyRemedy =
    "give it the same settings and make the same calls on every rank";
constexpr const char* kDigestRemedy =
    "give it the same settings and make the same calls on every rank (# is a digest of more that "
    "has to be the same)";
// Most callers have said `last`.
constexpr const char* kSyncRemedy =
    "give the same last= (True is sync 'all', False 'shard' or 'none') or the same sync= on every "
    "rank; ranks with different numbers of batches need hsdp.uneven, or has_batch in C++";
constexpr const char* kUnnamedParty = "an optimizer or replica hop";

std::string sync_text(Sync sync) {
  return sync == Sync::kNone ? "none" : sync == Sync::kShard ? "shard" : "all";
}

// "shard all none": one word a group.
std::string sync_text(const StatusWord& word) {
  std::string text;
  for (const GroupPlan& group : word.groups) {
    text += (text.empty() ? "" : " ") + sync_text(group.sync);
  }
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

std::string factor_text(double factor) { return factor == 0 ? "the default" : number_text(factor); }

std::string count_text(CountBy count_by) {
  return count_by == CountBy::kNothing   ? "nothing"
         : count_by == CountBy::kBatches ? "batches"
                                         : "tokens";
}

// What all must say alike, but for the parties.
std::vector<Field> fields(const WordNames& names, std::size_t group_count) {
  std::vector<Field> all{
      {"call", [](const StatusWord& w) { return w.call; }},
      {"step", [](const StatusWord& w) { return std::to_string(w.step); }},
      {names.microbatch, [](const StatusWord& w) { return std::to_string(w.microbatch); }},
      {"gradients per parameter", [](const StatusWord& w) { return w.sums; }},
      {"gradient divide factor", [](const StatusWord& w) { return factor_text(w.divide_factor); }},
      {"loss scale", [](const StatusWord& w) { return number_text(w.loss_scale); }},
      {"divide factor counted in", [](const StatusWord& w) { return count_text(w.count_by); }},
  };
  for (std::size_t g = 0; g < std::min(group_count, names.groups.size()); ++g) {
    all.push_back({"sync of " + names.groups[g], [g](const StatusWord& w) {
                     return g < w.groups.size() ? sync_text(w.groups[g].sync) : "nothing";
                   }});
  }
  all.push_back({"sync", [](const StatusWord& w) { return sync_text(w); }, kSyncRemedy});
  return all;
}

// Places of a Saying. Sections come last.
constexpr std::size_t kFieldsPlace = 0;
constexpr std::size_t kSectionCountPlace = 1;
constexpr std::size_t kFirstSectionPlace = 2;

// And of its largest numbers: the earliest step, as -step, then kGroupNumbers of each group.
constexpr std::size_t kFirstGroupNumber = 1;
constexpr std::size_t kGroupNumbers = 4;

// All that is compared but the sections, a line each.
std::string fields_text(const StatusWord& word) {
  std::string syncs;
  for (const GroupPlan& group : word.groups) syncs += std::to_string(static_cast<int>(group.sync));
  std::string lines;
  for (const std::string& field :
       {word.call, std::to_string(word.step), std::to_string(word.microbatch), syncs, word.sums,
        number_text(word.divide_factor), number_text(word.loss_scale),
        std::to_string(static_cast<int>(word.count_by))}) {
    lines += field + '\n';
  }
  return lines;
}

StatusWord parse_fields(const std::string& text) {
  std::istringstream stream(text);
  const auto line = [&stream] {
    std::string field;
    std::getline(stream, field);
    return field;
  };
  StatusWord word;
  word.call = line();
  word.step = std::stoll(line());
  word.microbatch = std::stoll(line());
  for (const char sync : line()) word.groups.push_back({.sync = static_cast<Sync>(sync - '0')});
  word.sums = line();
  word.divide_factor = number(line());
  word.loss_scale = number(line());
  word.count_by = static_cast<CountBy>(std::stoi(line()));
  return word;
}

const comm::Agreement::Place& place_of(const comm::Agreement& words, std::size_t place) {
  static const comm::Agreement::Place kNobody{};
  return place < words.places.size() ? words.places[place] : kNobody;
}

struct Comparison {
  StatusWord first;  // of the lowest rank
  std::span<const int> ranks;
  const WordNames& names;

  // The failure of the ranks whose value is not that of most; `values` belong to what was said.
  [[nodiscard]] std::optional<comm::Failure> of(const Field& field,
                                                std::span<const comm::Agreement::Said> said,
                                                const std::vector<std::string>& values) const;
};

std::optional<comm::Failure> Comparison::of(const Field& field,
                                            std::span<const comm::Agreement::Said> said,
                                            const std::vector<std::string>& values) const {
  if (std::ranges::adjacent_find(values, std::not_equal_to()) == values.end()) return std::nullopt;
  std::map<std::string, int> votes;
  for (std::size_t i = 0; i < said.size(); ++i) votes[values[i]] += said[i].count;
  // Among equals the lowest rank's.
  const std::string& expected = *std::ranges::max_element(
      values, {}, [&](const std::string& value) { return votes.at(value); });
  comm::Failure failure{comm::FailureKind::kMismatch, {}, {}};
  std::map<std::ptrdiff_t, std::string> others;  // by place in the group
  for (std::size_t i = 0; i < said.size(); ++i) {
    if (values[i] == expected) continue;
    for (const int rank : said[i].ranks) {
      others[std::ranges::find(ranks, rank) - ranks.begin()] = values[i];
    }
  }
  for (const auto& [place, value] : others) {
    failure.ranks.push_back(ranks[static_cast<std::size_t>(place)]);
  }
  const auto& [place, value] = *others.begin();
  failure.message =
      Message{.where = names.component + ": end of " + names.microbatch + " " +
                       std::to_string(first.microbatch) + " of step " + std::to_string(first.step),
              .expected = field.name + " '" + printable(expected) + "' on every rank",
              .got = "'" + printable(value) + "' on rank " + std::to_string(place) + " of " +
                     std::to_string(ranks.size()),
              .remedy = field.remedy.empty() ? names.remedy : field.remedy}
          .text();
  return failure;
}

// At most that many bytes, without half a character of UTF-8 at the end.
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
  if (call != kDropCall) mine.equal.emplace_back(fields_text(*this));
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

std::optional<StatusWord> Words::sent() const {
  for (const auto& said : place_of(all, kFieldsPlace).said) {
    StatusWord word = parse_fields(said.text);
    if (word.groups.empty()) continue;
    for (std::size_t g = 0; g < word.groups.size(); ++g) {
      const std::int64_t* const most = &all.most.at(kFirstGroupNumber + g * kGroupNumbers);
      word.groups[g] = {.sync = word.groups[g].sync,
                        .local_count = most[0],
                        .carry_count = most[1],
                        .has_carry = most[2] != 0,
                        .has_total = most[3] != 0};
    }
    return word;
  }
  return std::nullopt;
}

bool Words::is_gone(std::size_t party) const {
  return all.any.front() == '\0' && place_of(all, kFirstSectionPlace + party).said.empty();
}

bool has_digest(const comm::Agreement& words, std::size_t party) {
  return std::ranges::any_of(place_of(words, kFirstSectionPlace + party).said, [](const auto& said) {
    return said.text.find('#') != std::string::npos;
  });
}

std::optional<Mismatch> find_mismatch(const comm::Agreement& words, std::span<const int> ranks,
                                      const WordNames& names) {
  const auto& said = place_of(words, kFieldsPlace).said;
  if (said.empty()) return std::nullopt;
  const bool agree = std::ranges::all_of(
      words.places, [](const comm::Agreement::Place& place) { return place.said.size() < 2; });
  if (agree) return std::nullopt;
  std::vector<StatusWord> of_said;
  for (const auto& one : said) of_said.push_back(parse_fields(one.text));
  const Comparison comparison{of_said.front(), ranks, names};
  for (const Field& field : fields(names, of_said.front().groups.size())) {
    std::vector<std::string> values;
    for (const StatusWord& word : of_said) values.push_back(field.text(word));
    if (auto failure = comparison.of(field, said, values)) return Mismatch{*failure};
  }
  for (std::size_t place = kSectionCountPlace; place < words.places.size(); ++place) {
    Field field{"number of optimizers and replica hops", {},
                "make the same ones for this Reducer on every rank"};
    std::optional<std::size_t> party;
    if (place >= kFirstSectionPlace) {
      party = place - kFirstSectionPlace;
      field.name = *party < names.parties.size() ? names.parties[*party] : kUnnamedParty;
      field.remedy = has_digest(words, *party) ? kDigestRemedy : kPartyRemedy;
    }
    const auto& sections = words.places[place].said;
    std::vector<std::string> values;
    for (const auto& one : sections) values.push_back(one.text);
    if (auto failure = comparison.of(field, sections, values)) return Mismatch{*failure, party};
  }
  return std::nullopt;
}

void show_details(comm::Agreement& words, std::size_t party, const comm::Agreement& details) {
  const auto& told = place_of(details, 0).said;
  std::vector<std::istringstream> texts;
  for (const auto& one : told) texts.emplace_back(one.text);
  std::vector<std::string> lines(texts.size());
  while (!std::ranges::all_of(texts, [](const auto& text) { return text.eof(); })) {
    for (std::size_t i = 0; i < texts.size(); ++i) std::getline(texts[i], lines[i] = {});
    if (std::ranges::adjacent_find(lines, std::not_equal_to()) == lines.end()) continue;
    auto& said = words.places.at(kFirstSectionPlace + party).said = told;
    for (std::size_t i = 0; i < said.size(); ++i) said[i].text = lines[i];
    return;
  }
}

}  // namespace hsdp::reducer
