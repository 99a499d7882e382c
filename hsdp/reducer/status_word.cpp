#include "hsdp/reducer/status_word.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <iterator>
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

std::string groups_text(const std::vector<GroupPlan>& groups) {
  std::ostringstream text;
  for (const GroupPlan& group : groups) {
    text << static_cast<int>(group.sync) << ' ' << group.local_count << ' ' << group.carry_count
         << ' ' << group.has_carry << ' ' << group.has_total << ' ';
  }
  return text.str();
}

std::vector<GroupPlan> parse_groups(const std::string& text) {
  std::vector<GroupPlan> groups;
  std::istringstream numbers(text);
  int sync = 0;
  for (GroupPlan group; numbers >> sync >> group.local_count >> group.carry_count >>
                        group.has_carry >> group.has_total;) {
    group.sync = static_cast<Sync>(sync);
    groups.push_back(group);
  }
  return groups;
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

// They may hold any bytes: "41 " for "A", " " for an empty one, "- " for none.
std::string sections_text(const Sections& sections) {
  std::string text;
  for (const auto& section : sections) text += (section ? hexadecimal(*section) : "-") + ' ';
  return text;
}

Sections parse_sections(std::string_view text) {
  Sections sections;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    if (text.starts_with('-')) {
      sections.emplace_back();
    } else {
      std::string& section = sections.emplace_back(std::string()).value();
      for (std::size_t i = 0; i + 1 < end; i += 2) {
        unsigned byte = 0;
        std::from_chars(text.data() + i, text.data() + i + 2, byte, 16);
        section += static_cast<char>(byte);
      }
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return sections;
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

// Whether no field and no section differs.
bool agree(const StatusWord& a, const StatusWord& b) {
  return a.call == b.call && a.step == b.step && a.microbatch == b.microbatch && a.sums == b.sums &&
         a.divide_factor == b.divide_factor && a.loss_scale == b.loss_scale &&
         a.count_by == b.count_by && a.sections == b.sections &&
         std::ranges::equal(a.groups, b.groups, {}, &GroupPlan::sync, &GroupPlan::sync);
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

struct Comparison {
  std::span<const StatusWord> words;
  std::span<const int> ranks;
  const WordNames& names;

  // The failure of those `members` among the ranks whose field is not that of most.
  [[nodiscard]] std::optional<comm::Failure> of(const Field& field,
                                                std::span<const std::size_t> members) const;
};

std::optional<comm::Failure> Comparison::of(const Field& field,
                                            std::span<const std::size_t> members) const {
  if (members.empty()) return std::nullopt;
  std::vector<std::string> values;
  values.reserve(members.size());
  for (const std::size_t r : members) values.push_back(field.text(words[r]));
  const std::string expected = majority(values);
  comm::Failure failure{comm::FailureKind::kMismatch, {}, {}};
  std::string got;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (values[i] == expected) continue;
    if (failure.ranks.empty()) {
      got = "'" + printable(values[i]) + "' on rank " + std::to_string(members[i]) + " of " +
            std::to_string(words.size());
    }
    failure.ranks.push_back(ranks[members[i]]);
  }
  if (failure.ranks.empty()) return std::nullopt;
  const StatusWord& first = words[members.front()];
  const Message message{.where = names.component + ": end of " + names.microbatch + " " +
                                 std::to_string(first.microbatch) + " of step " +
                                 std::to_string(first.step),
                        .expected = field.name + " '" + printable(expected) + "' on every rank",
                        .got = got,
                        .remedy = field.remedy.empty() ? names.remedy : field.remedy};
  failure.message = message.text();
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

// A line for each field, the reason last: it may have several.
std::string StatusWord::encode() const {
  std::string lines;
  for (const std::string& field :
       {call, std::to_string(step), std::to_string(microbatch), groups_text(groups), sums,
        number_text(divide_factor), number_text(loss_scale),
        std::to_string(static_cast<int>(count_by)), sections_text(sections), std::to_string(count),
        std::to_string(static_cast<int>(dropped))}) {
    lines += field + '\n';
  }
  return lines + cut_text(reason, kMaxReasonBytes);
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
  word.groups = parse_groups(line());
  word.sums = line();
  word.divide_factor = number(line());
  word.loss_scale = number(line());
  word.count_by = static_cast<CountBy>(std::stoi(line()));
  word.sections = parse_sections(line());
  word.count = std::stoll(line());
  word.dropped = line() == "1";
  word.reason.assign(std::istreambuf_iterator<char>(stream), {});
  return word;
}

bool has_digest(std::span<const StatusWord> words, std::size_t party) {
  return std::ranges::any_of(words, [party](const StatusWord& word) {
    const bool is_there = party < word.sections.size() && word.sections[party];
    return is_there && word.sections[party]->find('#') != std::string::npos;
  });
}

std::optional<int> find_drop(std::span<const StatusWord> words) {
  const auto drop = std::ranges::find(words, true, &StatusWord::dropped);
  if (drop == words.end()) return std::nullopt;
  return static_cast<int>(drop - words.begin());
}

std::optional<Mismatch> find_mismatch(std::span<const StatusWord> words, std::span<const int> ranks,
                                      const WordNames& names) {
  const Comparison comparison{words, ranks, names};
  std::vector<std::size_t> members;  // those that are compared
  for (std::size_t r = 0; r < words.size(); ++r) {
    if (words[r].call != kDropCall) members.push_back(r);
  }
  if (members.empty()) return std::nullopt;
  const StatusWord& first = words[members.front()];
  if (std::ranges::all_of(members, [&](std::size_t r) { return agree(words[r], first); })) {
    return std::nullopt;
  }
  for (const Field& field : fields(names, first.groups.size())) {
    if (auto failure = comparison.of(field, members)) return Mismatch{*failure};
  }
  std::erase_if(members, [&](std::size_t r) { return words[r].dropped; });
  if (members.empty()) return std::nullopt;
  const Field count{"number of optimizers and replica hops",
                    [](const StatusWord& w) { return std::to_string(w.sections.size()); },
                    "make the same ones for this Reducer on every rank"};
  if (auto failure = comparison.of(count, members)) return Mismatch{*failure};
  for (std::size_t i = 0; i < words[members.front()].sections.size(); ++i) {
    const bool is_named = i < names.parties.size();
    const Field section{is_named ? names.parties[i] : kUnnamedParty,
                        [i](const StatusWord& w) { return w.sections[i].value(); },
                        has_digest(words, i) ? kDigestRemedy : kPartyRemedy};
    std::vector<std::size_t> present;
    std::ranges::copy_if(members, std::back_inserter(present),
                         [&](std::size_t r) { return words[r].sections[i].has_value(); });
    if (auto failure = comparison.of(section, present)) return Mismatch{*failure, i};
  }
  return std::nullopt;
}

void show_details(std::vector<StatusWord>& words, std::size_t party,
                  std::span<const std::string> details) {
  struct Told {
    std::optional<std::string>* section;
    std::istringstream text;
    std::string line{};
  };
  std::vector<Told> told;
  for (std::size_t r = 0; r < words.size(); ++r) {
    Sections& sections = words[r].sections;
    if (words[r].dropped || party >= sections.size() || !sections[party]) continue;
    told.push_back({&sections[party], std::istringstream(details[r])});
  }
  const auto talks = [](const Told& one) { return !one.text.view().empty(); };
  const auto silent = std::stable_partition(told.begin(), told.end(), talks);
  const std::span talking(told.begin(), silent);
  while (std::ranges::any_of(talking, [](const Told& one) { return !one.text.eof(); })) {
    for (Told& one : talking) std::getline(one.text, one.line = {});
    const auto is_first = [&](const Told& one) { return one.line == talking.front().line; };
    if (std::ranges::all_of(talking, is_first)) continue;
    for (const Told& one : talking) *one.section = one.line;
    for (const Told& one : std::span(silent, told.end())) one.section->reset();
    return;
  }
}

const StatusWord* find_sender(std::span<const StatusWord> words) {
  const auto sender =
      std::ranges::find_if(words, [](const StatusWord& word) { return !word.groups.empty(); });
  return sender == words.end() ? nullptr : &*sender;
}

}  // namespace hsdp::reducer
