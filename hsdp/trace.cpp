#include "hsdp/trace.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/operation_record.h"
#include "hsdp/comm/rank_reports.h"
#include "hsdp/comm/shared_clock.h"
#include "hsdp/error.h"
#include "hsdp/log.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/together.h"
#include "hsdp/reducer_internal.h"
#include "hsdp/snapshot/atomic_file.h"
#include "hsdp/trace_settings.h"

namespace hsdp {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kAct = "write its trace";
constexpr double kNanosecond = 1e-9;

// The first rank's clock by this rank's: measured twice, and a line between, as clocks drift.
class ClockLine {
 public:
  struct Point {
    double at_s = 0;
    comm::ClockOffset clock{};
  };
  ClockLine(Point begin, Point end) : begin_(begin), end_(end) {}

  [[nodiscard]] double first_s(double own_s) const {
    const double drift = (end_.clock.offset_s - begin_.clock.offset_s) / (end_.at_s - begin_.at_s);
    return own_s + begin_.clock.offset_s + drift * (own_s - begin_.at_s);
  }
  [[nodiscard]] double error_s() const {
    return std::max(begin_.clock.error_s, end_.clock.error_s);
  }

 private:
  Point begin_;
  Point end_;
};

ClockLine::Point measure(Communicator& world, const std::string& key,
                         const std::function<double()>& now_s) {
  const comm::ClockOffset clock = comm::measure_clock(world, key, now_s);
  return {now_s(), clock};
}

// One operation as a slice of the picture, in nanoseconds from the trace's begin.
struct TimeSlice {
  const RecordedOperation* one = nullptr;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  int track = 0;
};

bool is_of_bucket(const OperationPlace& place) {
  return place.kind <= OperationKind::kReplicaHop && place.index >= 0;
}

// The events of one rank, part by part: a rank keeps no more than one part as text.
class RankEvents {
 public:
  RankEvents(const reducer::Groups& groups, std::vector<TimeSlice> slices,
             const std::map<int, OperationSource>& sources, std::size_t part_bytes)
      : rank_(groups.world.rank()), slices_(std::move(slices)), part_bytes_(part_bytes) {
    const int shard = groups.shard.size();
    add({{"ph", "M"},
         {"name", "process_name"},
         {"pid", rank_},
         {"args",
          {{"name", "rank " + std::to_string(rank_) + " (replica " + std::to_string(rank_ / shard) +
                        ", shard " + std::to_string(rank_ % shard) + ")"}}}});
    add({{"ph", "M"},
         {"name", "process_sort_index"},
         {"pid", rank_},
         {"args", {{"sort_index", rank_}}}});
    std::ranges::stable_sort(slices_, {}, &TimeSlice::begin_ns);
    give_tracks(sources);
    find_flows();
  }

  // Moves the next events to `text`; false once these were the last.
  [[nodiscard]] bool take(std::string& text) {
    while (text_.size() < part_bytes_ && next_slice_ < slices_.size()) {
      add_slice(slices_[next_slice_++]);
    }
    while (text_.size() < part_bytes_ && !flows_.empty()) add_flow(flows_.extract(flows_.begin()));
    text = std::exchange(text_, {});
    return next_slice_ < slices_.size() || !flows_.empty();
  }

 private:
  using Bucket = std::array<std::int64_t, 4>;  // source, step, microbatch, index
  using Stations = std::map<OperationKind, const TimeSlice*>;
  using Flows = std::map<Bucket, Stations>;

  void add(const ordered_json& event) {
    if (!text_.empty()) text_ += ",\n";
    // A name may be cut within a character.
    text_ += event.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  }

  // Slices of one track must not overlap: what runs beside another one of its kind gets the next.
  void give_tracks(const std::map<int, OperationSource>& sources) {
    std::map<std::pair<OperationKind, int>, std::vector<TimeSlice*>> by_kind;
    for (TimeSlice& slice : slices_)
      by_kind[{slice.one->place.kind, slice.one->source}].push_back(&slice);
    const std::map<int, std::string> titles = titles_of(sources);
    int first_track = 1;
    for (const auto& [key, some] : by_kind) {
      std::vector<std::int64_t> ends_ns;
      for (TimeSlice* const slice : some) {
        const auto free = std::ranges::find_if(
            ends_ns, [&](std::int64_t end_ns) { return end_ns <= slice->begin_ns; });
        const auto place = static_cast<std::size_t>(free - ends_ns.begin());
        slice->track = first_track + static_cast<int>(place);
        if (free == ends_ns.end()) ends_ns.push_back(0);
        ends_ns[place] = slice->end_ns;
      }
      std::string title(name(key.first));
      std::ranges::replace(title, '_', ' ');
      const auto source = titles.find(key.second);
      if (titles.size() > 1 && source != titles.end()) title += ", " + source->second;
      for (std::size_t i = 0; i < ends_ns.size(); ++i) {
        name_track(first_track++, i == 0 ? title : title + " " + std::to_string(i + 1));
      }
    }
  }

  // Of the sources that have slices. Reducers may have one name, and have it unless given another:
  // the second one's title ends in "#2".
  [[nodiscard]] std::map<int, std::string> titles_of(
      const std::map<int, OperationSource>& sources) const {
    std::map<int, std::string> titles;
    for (const TimeSlice& slice : slices_) titles[slice.one->source];
    std::map<std::string, int> counts;
    for (auto& [number, title] : titles) {
      const auto source = sources.find(number);
      title = source == sources.end() ? "unknown" : source->second.name;
      const int count = ++counts[title];
      if (count > 1) title += " #" + std::to_string(count);
    }
    return titles;
  }

  void name_track(int track, const std::string& title) {
    add({{"ph", "M"},
         {"name", "thread_name"},
         {"pid", rank_},
         {"tid", track},
         {"args", {{"name", title}}}});
    add({{"ph", "M"},
         {"name", "thread_sort_index"},
         {"pid", rank_},
         {"tid", track},
         {"args", {{"sort_index", track}}}});
  }

  [[nodiscard]] static double microseconds(std::int64_t ns) {
    return static_cast<double>(ns) / 1e3;
  }

  void add_slice(const TimeSlice& slice) {
    const OperationPlace& place = slice.one->place;
    ordered_json args = ordered_json::object();
    if (place.step >= 0) args["step"] = place.step;
    if (place.microbatch >= 0) args["microbatch"] = place.microbatch;
    if (place.index >= 0)
      args[place.kind == OperationKind::kGather ? "unit" : "bucket"] = place.index;
    if (place.bytes > 0 || is_of_bucket(place)) args["bytes"] = place.bytes;
    if (slice.one->state != OperationState::kDone) {
      args["state"] = std::string(name(slice.one->state));
    }
    add({{"ph", "X"},
         {"name", range_name(place)},
         {"pid", rank_},
         {"tid", slice.track},
         {"ts", microseconds(slice.begin_ns)},
         {"dur", microseconds(slice.end_ns - slice.begin_ns)},
         {"args", args}});
  }

  void find_flows() {
    for (const TimeSlice& slice : slices_) {
      const OperationPlace& place = slice.one->place;
      if (!is_of_bucket(place)) continue;
      flows_[{slice.one->source, place.step, place.microbatch, place.index}][place.kind] = &slice;
    }
    std::erase_if(flows_, [](const auto& flow) { return flow.second.size() < 2; });
  }

  // An arrow from a bucket's pack to its shard hop, and on to its replica hop.
  void add_flow(const Flows::node_type& flow) {
    const Stations& stations = flow.mapped();
    // Different on each rank.
    const std::int64_t id = (static_cast<std::int64_t>(rank_) << 20U) + ++flow_count_;
    for (const auto& [kind, slice] : stations) {
      const bool is_first = slice == stations.begin()->second;
      const bool is_last = slice == stations.rbegin()->second;
      ordered_json event{{"ph", is_first  ? "s"
                                : is_last ? "f"
                                          : "t"},
                         {"cat", "bucket"},
                         {"name", "bucket"},
                         {"id", id},
                         {"pid", rank_},
                         {"tid", slice->track},
                         {"ts", microseconds(slice->begin_ns)}};
      if (is_last) event["bp"] = "e";  // to the slice around that time
      add(event);
    }
  }

  int rank_;
  std::vector<TimeSlice> slices_;
  std::size_t part_bytes_;
  std::size_t next_slice_ = 0;
  Flows flows_;
  std::int64_t flow_count_ = 0;
  std::string text_;
};

// What the first rank writes; afterwards the reason if it could not.
class TraceFile {
 public:
  TraceFile(const std::filesystem::path& path, int rank_count)
      : file_(path, "trace"), rank_count_(rank_count) {
    append("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  }

  // A part of a rank's report.
  void take(int rank, const comm::Agreement& part) noexcept {
    if (!part.any.empty() && error_.empty()) {
      error_ = "trace: write: expected the operations of every rank, got '" + part.any + "' on " +
               comm::ranks_text({rank}, rank_count_);
    }
    quietly([&] {
      if (is_begun_) append(",\n");
      is_begun_ = true;
      append(part.note);
      if (part.sum.empty()) return;
      errors_ns_.push_back(part.sum.at(0));
      dropped_count_ += part.sum.at(1);
    });
  }
  // The reason if something went wrong.
  [[nodiscard]] std::string finish(const reducer::Groups& groups) noexcept {
    quietly([&] {
      std::ranges::sort(errors_ns_, std::greater());
      const std::int64_t error_ns = errors_ns_[0] + (errors_ns_.size() > 1 ? errors_ns_[1] : 0);
      const ordered_json other{
          {"library", "hsdp"},
          {"engine", std::string(groups.world.engine_name())},
          {"times", groups.on_host() ? "host" : "host, which issues the GPU's work"},
          {"clock_error_ms", static_cast<double>(error_ns) * kNanosecond * 1e3},
          {"dropped_operations", dropped_count_}};
      append("\n],\"otherData\":" + other.dump() + "}\n");
      file_.commit();
    });
    return error_;
  }

 private:
  template <typename Act>
  void quietly(const Act& act) noexcept {
    if (!error_.empty()) return;
    try {
      act();
    } catch (const std::exception& error) {
      error_ = error.what() + (" (" + comm::ranks_text({0}, rank_count_) + ")");
    }
  }
  void append(std::string_view text) {
    file_.write_at(size_, std::as_bytes(std::span(text)));
    size_ += text.size();
  }

  AtomicFile file_;
  int rank_count_;
  bool is_begun_ = false;
  std::uint64_t size_ = 0;
  std::vector<std::int64_t> errors_ns_;
  std::int64_t dropped_count_ = 0;
  std::string error_;
};

}  // namespace

struct Trace::Parts {
  Parts(Reducer& its_reducer, TraceSettings its_settings)
      : settings(std::move(its_settings)),
        reducer(its_reducer),
        groups(ReducerInternal(its_reducer).groups()),
        record(groups.world.engine()->control().operations()) {}

  void begin(const std::filesystem::path& path);
  [[nodiscard]] RankEvents events(const OperationRecord::Trace& trace,
                                  const ClockLine& clock) const;

  TraceSettings settings;
  ReducerInternal reducer;
  reducer::Groups groups;
  std::shared_ptr<OperationRecord> record;
  reducer::ScopeEnd scope{};
  std::optional<TraceFile> file{};  // on the first rank
  std::string key{};
  ClockLine::Point begun{};
  double zero_s = 0;  // the trace's begin by the first rank's clock
  bool is_open = true;
};

void Trace::Parts::begin(const std::filesystem::path& path) {
  bool starts = false;
  const double start_s = settings.now_s();
  try {
    reducer::together(groups.world, "begin its trace", [&] {
      reducer.require_idle("trace");
      if (groups.world.rank() == 0) {
        if (path.empty()) {
          throw UsageError(
              {.where = "trace: begin", .expected = "a path on the first rank", .got = "none"});
        }
        try {
          file.emplace(path, groups.world.size());
        } catch (const SnapshotError& error) {
          throw Error(error.what());
        }
      }
      starts = record->start_trace();
      if (starts) return;
      throw UsageError({.where = "trace: begin",
                        .expected = "no other trace in this job",
                        .got = "one that runs",
                        .remedy = "end it first"});
    });
    key = groups.world.next_exchange_key();
    begun = measure(groups.world, key + "/begin", settings.now_s);
    const double first_s = start_s + begun.clock.offset_s;
    groups.world.post(key, {.most = {-std::llround(first_s / kNanosecond)}});  // the earliest
    zero_s = -static_cast<double>(groups.world.collect(key, kAct).most.at(0)) * kNanosecond;
  } catch (...) {
    if (starts) static_cast<void>(record->take_trace());
    throw;
  }
}

RankEvents Trace::Parts::events(const OperationRecord::Trace& trace, const ClockLine& clock) const {
  const double now_s = settings.now_s();
  const auto ns = [&](double own_s) {
    return std::int64_t{std::llround((clock.first_s(own_s) - zero_s) / kNanosecond)};
  };
  std::vector<TimeSlice> slices;
  for (const RecordedOperation& one : trace.contents.operations) {
    const bool has_ended = one.state != OperationState::kBegun;
    const std::int64_t begin_ns = ns(one.begin_s);
    // A slice without a length is not seen.
    const std::int64_t end_ns = std::max(ns(has_ended ? one.end_s : now_s), begin_ns + 1);
    slices.push_back({.one = &one, .begin_ns = begin_ns, .end_ns = end_ns});
  }
  return {groups, std::move(slices), trace.contents.sources, settings.part_bytes};
}

Trace::Trace(Reducer& reducer, const std::filesystem::path& path)
    : Trace(reducer, path, TraceSettings{}) {}

Trace::Trace(Reducer& reducer, const std::filesystem::path& path, TraceSettings settings)
    : parts_(std::make_unique<Parts>(reducer, std::move(settings))) {
  parts_->begin(path);
}

Trace begin_trace(Reducer& reducer, const std::filesystem::path& path, TraceSettings settings) {
  return {reducer, path, std::move(settings)};
}

Trace::~Trace() {
  if (parts_->is_open && !parts_->scope.raised()) {
    log_line(LogLevel::kWarning, "trace: left without write(): no file is written");
  }
  leave(parts_->scope.reason("its Trace was left without write()"));
}

// The word takes the place of write()'s among the calls of the ranks, and says why.
void Trace::leave(std::string_view reason) noexcept {
  if (!std::exchange(parts_->is_open, false)) return;
  Communicator& world = parts_->groups.world;
  try {
    world.post(world.next_exchange_key(),
               {.equal = {std::string(kAct), std::string(reason)}, .keeps_all = true});
  } catch (...) {  // the world's end, of which the others know
  }
  parts_->file.reset();
  try {
    static_cast<void>(parts_->record->take_trace());
  } catch (...) {  // it has ended all the same
  }
}

void Trace::write() {
  Communicator& world = parts_->groups.world;
  if (!parts_->is_open) {
    throw UsageError({.where = "trace: write",
                      .expected = "a trace that runs",
                      .got = "one that has ended",
                      .remedy = "make another Trace"});
  }
  OperationRecord::Trace trace;
  std::vector<std::string> reasons;
  try {
    parts_->reducer.require_idle("trace");
    parts_->reducer.wait_idle();
    trace = parts_->record->take_trace();
  } catch (const std::exception& error) {
    leave(error.what());
    throw;
  }
  try {
    reasons = world.exchange("", kAct);
  } catch (...) {
    // A rank that made another call leaves its block, too, and says so in its next word.
    leave("its calls differ from those of other ranks");
    throw;
  }
  parts_->is_open = false;
  std::optional<TraceFile> file = std::move(parts_->file);
  const auto reason = std::ranges::find_if(reasons, [](const auto& one) { return !one.empty(); });
  if (reason != reasons.end()) {
    const auto rank = static_cast<int>(reason - reasons.begin());
    throw StepAbortedError({.where = "trace: write",
                            .expected = "every rank to write its trace",
                            .got = "'" + *reason + "' on " + comm::ranks_text({rank}, world.size()),
                            .remedy = "no file was written"},
                           {world.world_rank(rank)});
  }
  const std::string& key = parts_->key;
  const ClockLine clock(parts_->begun, measure(world, key + "/clock", parts_->settings.now_s));
  std::optional<RankEvents> events;
  const auto next = [&](comm::Saying& part) {
    try {
      if (!events) {
        events.emplace(parts_->events(trace, clock));
        part.sum = {std::llround(clock.error_s() / kNanosecond), trace.dropped_count};
      }
      return events->take(part.note);
    } catch (const std::exception& error) {
      part = {.any = error.what()};
      return false;
    }
  };
  comm::report_to_first(world, key, next, kAct,
                        [&](int rank, const comm::Agreement& part) { file->take(rank, part); });
  const std::string error = file ? file->finish(parts_->groups) : "";
  world.post(key + "/written", {.note = error});
  const std::string told = world.collect(key + "/written", kAct).note;
  if (!told.empty()) throw Error(told);
}

}  // namespace hsdp
