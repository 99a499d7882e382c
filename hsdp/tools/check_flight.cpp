#include "hsdp/tools/check_flight.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/tools/flight_files.h"

namespace hsdp {
namespace {

using flight::Files;
using flight::Operation;
using flight::Partners;
using flight::partners_of;
using flight::Place;
using flight::RankFile;

std::string text_of(const Place& place) {
  std::string text = place.kind;
  if (place.index >= 0) {
    text += place.kind == "gather" ? " of unit " : " of bucket ";
    text += std::to_string(place.index);
  }
  if (place.step >= 0) text += ", step " + std::to_string(place.step);
  if (place.microbatch >= 0) text += ", microbatch " + std::to_string(place.microbatch);
  if (place.turn >= 0 && place.step < 0) text += ", turn " + std::to_string(place.turn);
  return text + " (" + place.source.name + ")";
}

std::string seconds_text(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f s", std::max(0.0, seconds));
  return text.data();
}

// An operation that some ranks had begun and others had not, or could not have.
struct Stuck {
  double since_s = 0;
  std::set<int> in_it;
  std::set<int> not_come;
  std::set<int> unknown;  // left no record
};

// A rank that is far ahead may have forgotten it, and one whose record is older may have come
// since.
bool lacks(const RankFile& file, const Operation& one) {
  if (file.by_place.contains(one.place) || file.written_s < one.begin_s) return false;
  return !file.is_cut || file.operations.front().begin_s < one.begin_s;
}

std::map<Place, Stuck> find_stuck(const Files& files) {
  std::map<Place, Stuck> found;
  for (const auto& [rank, file] : files) {
    for (const Operation& one : file.operations) {
      const std::optional<Partners> whom = partners_of(one.place.kind);
      if (!whom || one.is_done()) continue;
      Stuck stuck{one.begin_s, {rank}, {}, {}};
      for (const int partner : one.place.source.partners(rank, *whom)) {
        const auto theirs = files.find(partner);
        if (theirs == files.end()) {
          stuck.unknown.insert(partner);
        } else if (lacks(theirs->second, one)) {
          stuck.not_come.insert(partner);
        }
      }
      const bool was_issued = one.state == "issued";  // and may have been done since
      if (stuck.not_come.empty() && (was_issued || stuck.unknown.empty())) continue;
      const auto [place, is_new] = found.try_emplace(one.place, stuck);
      if (is_new) continue;
      Stuck& all = place->second;
      all.since_s = std::min(all.since_s, one.begin_s);
      all.in_it.insert(rank);
      all.not_come.merge(stuck.not_come);
      all.unknown.merge(stuck.unknown);
    }
  }
  return found;
}

class Report {
 public:
  explicit Report(const std::filesystem::path& folder) : Report(flight::read_folder(folder)) {}
  explicit Report(flight::Folder folder)
      : files_(std::move(folder.files)),
        size_(files_.begin()->second.size),
        stuck_(find_stuck(files_)) {
    std::set<int> expected;  // ranks of other meshes may have nothing to record
    for (const auto& [rank, file] : files_) {
      for (const auto& one : file.sources) expected.insert(one.ranks.begin(), one.ranks.end());
    }
    for (const int rank : expected) {
      if (!files_.contains(rank)) missing_.insert(rank);
    }
    text_ << "flight records of " << files_.size() << " of " << size_
          << " ranks of the job that began at " << flight::time_text(files_.begin()->second.job)
          << "\n";
    add_earlier(folder.earlier);
    if (!missing_.empty()) text_ << ranks(missing_) << " left no record\n";
    add_errors();
    add_stuck();
    add_waited_for();
    add_last_common();
  }
  [[nodiscard]] FlightFindings findings() const {
    return {text_.str(), missing_.empty() && stuck_.empty() && !has_error_};
  }

 private:
  static constexpr std::size_t kMostLines = 10;

  [[nodiscard]] std::string ranks(const std::set<int>& some) const {
    return comm::ranks_text({some.begin(), some.end()}, size_);
  }

  void add_earlier(const std::vector<RankFile>& earlier) {
    std::map<std::pair<std::int64_t, int>, std::vector<int>> jobs;  // by begin and size
    for (const RankFile& file : earlier) jobs[{file.job, file.size}].push_back(file.rank);
    for (const auto& [job, some] : jobs) {
      text_ << comm::ranks_text(some, job.second) << " left only a record of an earlier job, of "
            << flight::time_text(job.first) << "\n";
    }
  }

  void add_errors() {
    std::map<std::string, std::set<int>> errors;
    for (const auto& [rank, file] : files_) {
      if (!file.error.empty()) errors[file.error].insert(rank);
    }
    has_error_ = !errors.empty();
    std::size_t count = 0;
    for (const auto& [error, some] : errors) {
      if (count++ < kMostLines) text_ << "error on " << ranks(some) << ": " << error << "\n";
    }
    if (count > kMostLines) text_ << "and " << count - kMostLines << " errors more\n";
  }

  // The one that began first comes first.
  void add_stuck() {
    std::vector<const std::pair<const Place, Stuck>*> in_order;
    for (const auto& one : stuck_) in_order.push_back(&one);
    std::ranges::sort(in_order, {}, [](const auto* one) { return one->second.since_s; });
    for (std::size_t i = 0; i < in_order.size() && i < kMostLines; ++i) {
      const auto& [place, stuck] = *in_order[i];
      const double seconds = files_.at(*stuck.in_it.begin()).written_s - stuck.since_s;
      text_ << text_of(place) << ": " << ranks(stuck.in_it) << " waited in it for "
            << seconds_text(seconds) << "\n";
      if (!stuck.not_come.empty()) text_ << "    had not come: " << ranks(stuck.not_come) << "\n";
      if (!stuck.unknown.empty()) text_ << "    left no record: " << ranks(stuck.unknown) << "\n";
    }
    if (in_order.size() > kMostLines) {
      text_ << "and " << in_order.size() - kMostLines << " operations more\n";
    }
  }

  // Who had not come and did not wait for others itself; else those without a record, which are
  // gone or stopped.
  [[nodiscard]] std::set<int> awaited() const {
    std::set<int> unknown;
    std::set<int> not_come;
    for (const auto& [place, stuck] : stuck_) {
      not_come.insert(stuck.not_come.begin(), stuck.not_come.end());
      unknown.insert(stuck.unknown.begin(), stuck.unknown.end());
    }
    for (const auto& [place, stuck] : stuck_) {
      for (const int rank : stuck.in_it) not_come.erase(rank);
    }
    return not_come.empty() ? unknown : not_come;
  }

  void add_waited_for() {
    const std::set<int> awaited = this->awaited();
    if (awaited.empty()) {
      text_ << (!stuck_.empty() ? "each rank waited for another\n"
                : has_error_    ? "every rank had come to what the others had begun\n"
                                : "no rank waited for another\n");
      return;
    }
    text_ << "the others waited for " << ranks(awaited) << "\n";
    for (const int rank : awaited) {
      const auto file = files_.find(rank);
      if (file == files_.end() || file->second.operations.empty()) continue;
      const Operation& last = file->second.operations.back();
      text_ << "    " << comm::ranks_text({rank}, size_) << " on " << file->second.host
            << " did last: " << text_of(last.place) << ", " << last.state << ", begun "
            << seconds_text(file->second.written_s - last.begin_s) << " before its record\n";
    }
  }

  void add_last_common() {
    const std::vector<Operation>& some = files_.begin()->second.operations;
    const auto completed = [this](const Operation& one) {
      if (!partners_of(one.place.kind)) return false;
      return std::ranges::all_of(one.place.source.ranks, [&](int rank) {
        const auto file = files_.find(rank);
        if (file == files_.end()) return true;
        const auto found = file->second.by_place.find(one.place);
        return found != file->second.by_place.end() && found->second->is_done();
      });
    };
    const auto last = std::find_if(some.rbegin(), some.rend(), completed);
    if (last != some.rend()) {
      text_ << "the last operation that all ranks completed: " << text_of(last->place) << "\n";
      return;
    }
    text_ << "no operation that all ranks completed is in the records\n";
  }

  Files files_;
  int size_;
  std::map<Place, Stuck> stuck_;
  std::set<int> missing_;
  bool has_error_ = false;
  std::ostringstream text_;
};

}  // namespace

FlightFindings read_flight(const std::filesystem::path& folder) {
  return Report(folder).findings();
}

}  // namespace hsdp
