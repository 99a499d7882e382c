#include "hsdp/comm/agreement.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "hsdp/comm/control/wire_text.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

constexpr std::size_t kMostPlaces = std::size_t{1} << 16U;

void write_numbers(WireWriter& out, const std::vector<std::int64_t>& numbers) {
  out.number(numbers.size());
  for (const std::int64_t number : numbers) out.signed_number(number);
}

std::vector<std::int64_t> read_numbers(WireReader& in) {
  std::vector<std::int64_t> numbers(in.short_count());
  for (std::int64_t& number : numbers) number = in.signed_number();
  return numbers;
}

}  // namespace

Saying message_to_all(std::string message) {
  return {.equal = {std::move(message)}, .keeps_all = true};
}

void Saying::encode(WireWriter& out) const {
  out.number(keeps_all ? 1 : 0);
  out.number(equal.size());
  for (const auto& text : equal) {
    out.number(text ? 1 : 0);
    if (text) out.short_text(*text);
  }
  out.short_text(any);
  write_numbers(out, sum);
  write_numbers(out, most);
  out.short_text(note);
}

Saying Saying::decode(WireReader& in) {
  Saying saying;
  saying.keeps_all = in.number() != 0;
  saying.equal.resize(in.short_count(kMostPlaces));
  for (auto& text : saying.equal) {
    if (in.number() != 0) text = in.short_text();
  }
  saying.any = in.short_text();
  saying.sum = read_numbers(in);
  saying.most = read_numbers(in);
  saying.note = in.short_text();
  return saying;
}

void Agreement::add(int rank, const Saying& saying) {
  Agreement own{.any = saying.any,
                .sum = saying.sum,
                .most = saying.most,
                .note = saying.note,
                .note_rank = saying.note.empty() ? -1 : rank,
                .keeps_all = saying.keeps_all};
  for (const auto& text : saying.equal) {
    Place& place = own.places.emplace_back();
    if (text) place.said.push_back({.text = *text, .count = 1, .ranks = {rank}});
  }
  merge(own);
}

void Agreement::merge(const Agreement& other) {
  places.resize(std::max(places.size(), other.places.size()));
  for (std::size_t i = 0; i < other.places.size(); ++i) {
    auto& all = places[i].said;
    for (const Said& one : other.places[i].said) {
      auto said = std::ranges::find(all, one.text, &Said::text);
      if (said == all.end()) said = all.insert(all.end(), {.text = one.text});
      said->count += one.count;
      said->ranks.insert(said->ranks.end(), one.ranks.begin(), one.ranks.end());
    }
  }
  any.resize(std::max(any.size(), other.any.size()));
  for (std::size_t i = 0; i < other.any.size(); ++i) {
    any[i] = static_cast<char>(static_cast<unsigned char>(any[i]) |
                               static_cast<unsigned char>(other.any[i]));
  }
  sum.resize(std::max(sum.size(), other.sum.size()));
  for (std::size_t i = 0; i < other.sum.size(); ++i) {  // unsigned: may wrap
    sum[i] = static_cast<std::int64_t>(static_cast<std::uint64_t>(sum[i]) +
                                       static_cast<std::uint64_t>(other.sum[i]));
  }
  for (std::size_t i = 0; i < other.most.size(); ++i) {
    if (i == most.size()) most.push_back(other.most[i]);
    most[i] = std::max(most[i], other.most[i]);
  }
  if (other.note_rank >= 0 && (note_rank < 0 || other.note_rank < note_rank)) {
    note = other.note;
    note_rank = other.note_rank;
  }
  keeps_all = keeps_all || other.keeps_all;
}

void Agreement::close() {
  for (Place& place : places) {
    auto& all = place.said;
    for (Said& said : all) std::ranges::sort(said.ranks);
    if (!keeps_all && all.size() > kMostTexts) {
      std::ranges::sort(
          all, {}, [](const Said& said) { return std::tuple(-said.count, said.ranks.front()); });
      all.resize(kMostTexts);
    }
    std::ranges::sort(all, {}, [](const Said& said) { return said.ranks.front(); });
    if (keeps_all) continue;
    for (Said& said : all) said.ranks.resize(std::min(said.ranks.size(), kMostRanks));
  }
}

std::vector<std::string> Agreement::messages(std::span<const int> ranks, std::size_t place) const {
  std::vector<std::pair<int, const std::string*>> by_rank;
  for (const Said& said : places.at(place).said) {
    for (const int rank : said.ranks) by_rank.emplace_back(rank, &said.text);
  }
  std::ranges::sort(by_rank);
  std::vector<std::string> messages;
  messages.reserve(ranks.size());
  for (const int rank : ranks) {
    const auto said =
        std::ranges::lower_bound(by_rank, rank, {}, &std::pair<int, const std::string*>::first);
    if (said == by_rank.end() || said->first != rank) {
      throw Error("control: an answer without a message of rank " + std::to_string(rank));
    }
    messages.push_back(*said->second);
  }
  return messages;
}

void Agreement::encode(WireWriter& out) const {
  out.number(keeps_all ? 1 : 0);
  out.number(places.size());
  for (const Place& place : places) {
    out.number(place.said.size());
    for (const Said& said : place.said) {
      out.short_text(said.text);
      out.signed_number(said.count);
      out.runs(said.ranks);
    }
  }
  out.short_text(any);
  write_numbers(out, sum);
  write_numbers(out, most);
  out.signed_number(note_rank);
  out.short_text(note);
}

Agreement Agreement::decode(WireReader& in) {
  Agreement agreement;
  agreement.keeps_all = in.number() != 0;
  agreement.places.resize(in.short_count(kMostPlaces));
  for (Place& place : agreement.places) {
    for (std::size_t left = in.short_count(); left > 0 && in.ok(); --left) {
      Said& said = place.said.emplace_back();
      said.text = in.short_text();
      said.count = static_cast<int>(in.signed_number());
      said.ranks = in.runs();
      if (said.ranks.empty()) in.fail();  // so there are no more texts than ranks
    }
  }
  agreement.any = in.short_text();
  agreement.sum = read_numbers(in);
  agreement.most = read_numbers(in);
  agreement.note_rank = static_cast<int>(in.signed_number());
  agreement.note = in.short_text();
  return agreement;
}

}  // namespace hsdp::comm
