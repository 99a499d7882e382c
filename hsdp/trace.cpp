#include "hsdp/trace.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
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
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/together.h"
#include "hsdp/reducer_internal.h"
#include "hsdp/snapshot/atomic_file.h"

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

ClockLine::Point measure(Communicator& world, const std::string& key) {
  const comm::ClockOffset clock = comm::measure_clock(world, key, Operations::now_s);
  return {Operations::now_s(), clock};
}

// One operation as a slice of the picture.
struct TimeSlice {
  const RecordedOperation* one = nullptr;
  double begin_s = 0;  // from the trace's begin
  double end_s = 0;
  int track = 0;
};

bool is_of_bucket(const OperationPlace& place) {
  return place.kind <= OperationKind::kReplicaHop && place.index >= 0;
}

// The events of one rank.
class RankEvents {
 public:
  RankEvents(int rank, const reducer::Groups& groups) : rank_(rank) {
    const int shard = groups.shard.size();
    add({{"ph", "M"},
         {"name", "process_name"},
         {"pid", rank},
         {"args",
          {{"name", "rank " + std::to_string(rank) + " (replica " + std::to_string(rank / shard) +
                        ", shard " + std::to_string(rank % shard) + ")"}}}});
    add({{"ph", "M"},
         {"name", "process_sort_index"},
         {"pid", rank},
         {"args", {{"sort_index", rank}}}});
  }

  // Slices of one track must not overlap: what runs beside another one of its kind gets the next.
  void add_slices(std::vector<TimeSlice> slices, const std::map<int, OperationSource>& sources) {
    std::ranges::stable_sort(slices, {}, &TimeSlice::begin_s);
    std::map<std::pair<OperationKind, int>, std::vector<TimeSlice*>> by_kind;
    for (TimeSlice& slice : slices)
      by_kind[{slice.one->place.kind, slice.one->source}].push_back(&slice);
    std::map<int, int> used;
    for (const auto& [key, some] : by_kind) ++used[key.second];
    int first_track = 1;
    for (const auto& [key, some] : by_kind) {
      std::vector<double> ends;
      for (TimeSlice* const slice : some) {
        const auto free =
            std::ranges::find_if(ends, [&](double end) { return end <= slice->begin_s; });
        slice->track = first_track + static_cast<int>(free - ends.begin());
        if (free == ends.end()) ends.push_back(0);
        ends[static_cast<std::size_t>(slice->track - first_track)] = slice->end_s;
      }
      std::string title(name(key.first));
      std::ranges::replace(title, '_', ' ');
      const auto source = sources.find(key.second);
      if (used.size() > 1 && source != sources.end()) title += ", " + source->second.name;
      for (std::size_t i = 0; i < ends.size(); ++i) {
        name_track(first_track++, i == 0 ? title : title + " " + std::to_string(i + 1));
      }
    }
    for (const TimeSlice& slice : slices) add_slice(slice);
    add_flows(slices);
  }

  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  void add(const ordered_json& event) {
    if (!text_.empty()) text_ += ",\n";
    // A name may be cut within a character.
    text_ += event.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
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

  // Microseconds, to the nanosecond.
  [[nodiscard]] static double ticks(double seconds) { return std::round(seconds * 1e9) / 1e3; }

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
    const double begin = ticks(slice.begin_s);
    add({{"ph", "X"},
         {"name", range_name(place)},
         {"pid", rank_},
         {"tid", slice.track},
         {"ts", begin},
         {"dur", std::max(ticks(slice.end_s) - begin, 0.001)},
         {"args", args}});
  }

  // An arrow from a bucket's pack to its shard hop, and on to its replica hop.
  void add_flows(const std::vector<TimeSlice>& slices) {
    using Bucket = std::array<std::int64_t, 4>;
    std::map<Bucket, std::map<OperationKind, const TimeSlice*>> buckets;
    for (const TimeSlice& slice : slices) {
      const OperationPlace& place = slice.one->place;
      if (!is_of_bucket(place)) continue;
      buckets[{slice.one->source, place.step, place.microbatch, place.index}][place.kind] = &slice;
    }
    std::int64_t id = static_cast<std::int64_t>(rank_) << 20U;  // different on each rank
    for (const auto& [bucket, stations] : buckets) {
      if (stations.size() < 2) continue;
      ++id;
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
                           {"ts", ticks(slice->begin_s)}};
        if (is_last) event["bp"] = "e";  // to the slice around that time
        add(event);
      }
    }
  }

  int rank_;
  std::string text_;
};

// What the first rank writes; afterwards the reason if it could not.
class TraceFile {
 public:
  explicit TraceFile(const std::filesystem::path& path) : file_(path, "trace") {
    append("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  }

  void take(int rank, const comm::Agreement& report) noexcept {
    quietly([&] {
      if (rank > 0) append(",\n");
      append(report.note);
      errors_ns_.push_back(report.sum.at(0));
      dropped_count_ += report.sum.at(1);
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
      error_ = error.what();
    }
  }
  void append(std::string_view text) {
    file_.write_at(size_, std::as_bytes(std::span(text)));
    size_ += text.size();
  }

  AtomicFile file_;
  std::uint64_t size_ = 0;
  std::vector<std::int64_t> errors_ns_;
  std::int64_t dropped_count_ = 0;
  std::string error_;
};

}  // namespace

struct Trace::Parts {
  explicit Parts(Reducer& its_reducer)
      : reducer(its_reducer),
        groups(ReducerInternal(its_reducer).groups()),
        record(groups.world.engine()->control().operations()) {}

  void begin(const std::filesystem::path& path);
  [[nodiscard]] std::string events(const OperationRecord::Trace& trace,
                                   const ClockLine& clock) const;

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
  const double start_s = Operations::now_s();
  try {
    reducer::together(groups.world, "begin its trace", [&] {
      if (groups.world.rank() == 0) {
        try {
          file.emplace(path);
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
    begun = measure(groups.world, key + "/begin");
    const double first_s = start_s + begun.clock.offset_s;
    groups.world.post(key, {.most = {-std::llround(first_s / kNanosecond)}});  // the earliest
    zero_s = -static_cast<double>(groups.world.collect(key, kAct).most.at(0)) * kNanosecond;
  } catch (...) {
    if (starts) static_cast<void>(record->take_trace());
    throw;
  }
}

std::string Trace::Parts::events(const OperationRecord::Trace& trace,
                                 const ClockLine& clock) const {
  const double now_s = Operations::now_s();
  std::vector<TimeSlice> slices;
  for (const RecordedOperation& one : trace.contents.operations) {
    const bool has_ended = one.state != OperationState::kBegun;
    slices.push_back({&one, clock.first_s(one.begin_s) - zero_s,
                      clock.first_s(has_ended ? one.end_s : now_s) - zero_s});
  }
  RankEvents events(groups.world.rank(), groups);
  events.add_slices(std::move(slices), trace.contents.sources);
  return events.take();
}

Trace::Trace(Reducer& reducer, const std::filesystem::path& path)
    : parts_(std::make_unique<Parts>(reducer)) {
  parts_->begin(path);
}

Trace::~Trace() { leave(parts_->scope.reason("its Trace was left without write()")); }

void Trace::leave(std::string_view reason) noexcept {
  if (!std::exchange(parts_->is_open, false)) return;
  try {
    static_cast<void>(parts_->record->take_trace());
    parts_->groups.world.post(parts_->key + "/end", {.note = std::string(reason)});
  } catch (...) {  // the world's end, of which the others know
  }
  parts_->file.reset();
}

void Trace::write() {
  Communicator& world = parts_->groups.world;
  const std::string& key = parts_->key;
  if (!parts_->is_open) {
    throw UsageError({.where = "trace: write",
                      .expected = "one write()",
                      .got = "another",
                      .remedy = "make another Trace"});
  }
  try {
    parts_->reducer.wait_idle();
  } catch (...) {
    leave("its Reducer failed");
    throw;
  }
  parts_->is_open = false;
  const OperationRecord::Trace trace = parts_->record->take_trace();
  std::optional<TraceFile> file = std::move(parts_->file);
  world.post(key + "/end", {});
  const comm::Agreement end = world.collect(key + "/end", kAct);
  if (!end.note.empty()) {
    const auto rank = std::ranges::find(world.world_ranks(), end.note_rank);
    const auto mesh_rank = static_cast<int>(rank - world.world_ranks().begin());
    throw StepAbortedError(
        {.where = "trace: write",
         .expected = "every rank to write its trace",
         .got = "'" + end.note + "' on " + comm::ranks_text({mesh_rank}, world.size()),
         .remedy = "no file was written"},
        {end.note_rank});
  }
  const ClockLine clock(parts_->begun, measure(world, key + "/clock"));
  comm::report_to_first(world, key,
                        {.sum = {std::llround(clock.error_s() / kNanosecond), trace.dropped_count},
                         .note = parts_->events(trace, clock)},
                        kAct,
                        [&](int rank, const comm::Agreement& report) { file->take(rank, report); });
  const std::string error = file ? file->finish(parts_->groups) : "";
  world.post(key + "/written", {.note = error});
  const std::string told = world.collect(key + "/written", kAct).note;
  if (!told.empty()) throw Error(told + " (" + comm::ranks_text({0}, world.size()) + ")");
}

}  // namespace hsdp
