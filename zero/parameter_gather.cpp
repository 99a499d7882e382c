#include "zero/parameter_gather.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "hsdp/comm/operation_record.h"
#include "hsdp/device/scratch.h"
#include "hsdp/error.h"
#include "hsdp/index_check.h"
#include "hsdp/reducer/slice_gather.h"
#include "hsdp/reducer_internal.h"
#include "zero/parameter_check.h"
#include "zero/stored_slice.h"

namespace hsdp::zero {
namespace {

using reducer::FullArray;
using reducer::GatherUnit;

constexpr const char* kWhere = "zero: parameter gather";

void check_master(const GatheredParameter& parameter, const Slice& own) {
  const TensorView& master = parameter.master;
  if (master.data == nullptr && master.count == 0) return;
  require_master(std::string(kWhere) + ": master of '" + parameter.name + "'", master, own.count,
                 parameter.array.dtype, parameter.array.device);
}

}  // namespace

struct ParameterGather::Parts {
  Parts(Reducer& its_reducer, std::vector<GatheredParameter> its_parameters, Completes what)
      : layout((its_reducer.prepare(), its_reducer.layout())),
        completes(what),
        memory(ReducerInternal(its_reducer).memory_count()),
        parameters(std::move(its_parameters)) {}

  // Checks everything and divides it into units. Returns the lines that all ranks must agree on.
  std::vector<std::string> divide(Reducer& reducer, std::int64_t unit_bytes);
  void make_check(const Reducer& reducer);
  // Waits until all units are gathered.
  void wait_gathered() const;
  struct How {
    CallLabel label{};
    bool is_compared = false;
  };
  Event start(int unit, const Event& updated, const How& how);
  void gather(std::size_t unit, const How& how, Stream& stream);
  // UsageError for an unknown number.
  [[nodiscard]] std::size_t unit_number(int unit) const {
    return check_index(kWhere, "a unit below", unit, std::ssize(units));
  }
  [[nodiscard]] std::size_t index(int parameter) const {
    return check_index(kWhere, "a parameter index below", parameter, std::ssize(parameters));
  }

  const BucketLayout& layout;
  const Completes completes;
  MemoryCount memory;
  std::vector<GatheredParameter> parameters;
  std::unordered_map<std::string_view, int> indices;  // by name
  std::vector<GatherUnit> units;
  ScratchReserve scratch;  // of a unit's message
  MemoryCount::Held scratch_held;
  MemoryCount::Held expected;                          // messages
  std::vector<std::vector<int>> members;               // of the units
  std::vector<int> unit_of;                            // [index], -1: no elements
  std::unordered_map<int, const TensorView*> masters;  // by number of registration
  mutable std::mutex mutex;
  std::vector<Event> gathered;  // by unit
  GatherStats stats;
  std::vector<GatherTime> times;          // by unit
  std::shared_ptr<ParameterCheck> check;  // null: nothing is compared
  std::unique_ptr<GatherLane> lane;       // last, as its tasks use the rest
};

std::vector<std::string> ParameterGather::Parts::divide(Reducer& reducer, std::int64_t unit_bytes) {
  if (unit_bytes < 1) {
    throw UsageError({.where = kWhere,
                      .expected = "unit_bytes of at least 1",
                      .got = std::to_string(unit_bytes)});
  }
  std::vector<NamedArray> arrays;
  for (const GatheredParameter& parameter : parameters) {
    arrays.push_back({parameter.name, parameter.array});
  }
  const std::vector<FullArray> full = reducer::full_arrays(
      reducer.parameters(), arrays, reducer.device(), kWhere, [&](int parameter) {
        const RowCut shards =
            layout.slices(parameter).joined(ReducerInternal(reducer).slice_parts());
        return completes == Completes::kParameters ? shards.count()
                                                   : shards.length(reducer.shard_rank());
      });
  std::vector<std::string> lines{std::to_string(unit_bytes) + " bytes a unit"};
  std::unordered_map<int, int> index_of;  // by number of registration
  for (std::size_t i = 0; i < full.size(); ++i) {
    const GatheredParameter& parameter = parameters[i];
    check_master(parameter, reducer.slice(parameter.name));
    const int registered = full[i].parameter;
    index_of.emplace(registered, static_cast<int>(i));
    indices.emplace(parameter.name, static_cast<int>(i));
    if (parameter.master.count > 0) masters.emplace(registered, &parameter.master);
    lines.push_back("'" + parameter.name + "' " + std::string(name(parameter.array.dtype)));
  }
  // By whole sizes, so that ranks with slices of other sizes have the same units.
  std::vector<FullArray> whole = full;
  for (FullArray& one : whole) one.array.count = layout.slices(one.parameter).count();
  units = reducer::gather_units(layout, whole, unit_bytes);
  scratch = ScratchReserve(reducer.device(), reducer::gather_scratch(layout, units));
  scratch_held = memory.hold(MemoryKind::kScratch, scratch.size_bytes());
  unit_of.assign(parameters.size(), -1);
  for (std::size_t u = 0; u < units.size(); ++u) {
    std::vector<int>& of_unit = members.emplace_back();
    for (FullArray& array : units[u]) {
      of_unit.push_back(index_of.at(array.parameter));
      array.array = parameters[static_cast<std::size_t>(of_unit.back())].array;
      unit_of[static_cast<std::size_t>(of_unit.back())] = static_cast<int>(u);
    }
  }
  const reducer::SliceOwner owner{reducer.shard_rank(), 0, ReducerInternal(reducer).slice_parts()};
  expected = memory.expect(MemoryKind::kParameterGather,
                           completes == Completes::kParameters
                               ? reducer::unit_message_bytes(owner, layout, units)
                               : reducer::parts_message_bytes(owner, layout, units));
  make_check(reducer);
  gathered.resize(units.size());
  times.resize(units.size());
  return lines;
}

void ParameterGather::Parts::make_check(const Reducer& reducer) {
  const std::int64_t every = ReducerInternal(reducer).verify_every();
  if (every == 0 || completes != Completes::kParameters) return;
  if (reducer.state().step_begun) {
    throw UsageError({.where = kWhere,
                      .expected = "its construction between steps, as verify_every compares it",
                      .got = "one while a step is begun",
                      .remedy = "make it before the step's first microbatch"});
  }
  std::vector<std::string> names;
  names.reserve(parameters.size());
  for (const GatheredParameter& one : parameters) names.push_back(one.name);
  check = std::make_shared<ParameterCheck>(every, reducer.device(), std::move(names));
}

void ParameterGather::Parts::wait_gathered() const {
  std::vector<Event> events;
  {
    const std::scoped_lock lock(mutex);
    events = gathered;
  }
  for (const Event& event : events) lane->wait(event);
}

void ParameterGather::Parts::gather(std::size_t unit, const How& how, Stream& stream) {
  reducer::Groups& groups = lane->groups();
  const reducer::SliceOwner owner = groups.owner();
  const double begin_s = Operations::now_s();
  std::int64_t bytes = 0;
  std::vector<reducer::CutArray> shards;
  for (const FullArray& full : units[unit]) {
    bytes += static_cast<std::int64_t>(full.array.size_in_bytes());
    Slice own = layout.slice(full.parameter, owner.slice_rank());
    if (completes == Completes::kShardSlices) {
      shards.push_back(reducer::replica_parts(owner, layout, full.parameter, full.array));
      own.offset = shards.back().cut.begin(owner.part);
    }
    const auto master = masters.find(full.parameter);
    if (master == masters.end()) continue;
    round_into(*master->second, full.array.slice(own.offset, own.count), stream);
  }
  const std::int64_t gathers =
      completes == Completes::kParameters
          ? reducer::gather_unit(groups, layout, units[unit], memory, stream, how.label)
      : groups.parts == 1
          ? 0
          : reducer::gather_arrays(groups.replicate, shards, memory, stream, how.label);
  for (std::size_t i = 0; how.is_compared && i < units[unit].size(); ++i) {
    check->add(static_cast<std::size_t>(members[unit][i]), units[unit][i].array, stream);
  }
  const std::scoped_lock lock(mutex);
  times[unit] = {begin_s, Operations::now_s()};
  stats.gather_count += gathers;
  if (gathers > 0) stats.bytes += bytes;
}

ParameterGather::ParameterGather(Reducer& reducer, std::vector<GatheredParameter> parameters,
                                 std::int64_t unit_bytes, Completes completes)
    : parts_(std::make_unique<Parts>(reducer, std::move(parameters), completes)) {
  parts_->lane = ReducerInternal(reducer).make_lane(
      "hsdp-gather", [&] { return parts_->divide(reducer, unit_bytes); });
  if (parts_->check) reducer.add_party(parts_->check);
}

ParameterGather::~ParameterGather() {
  if (parts_->check) parts_->check->forget();
}

int ParameterGather::unit_count() const { return static_cast<int>(parts_->units.size()); }

const std::vector<int>& ParameterGather::unit(int number) const {
  return parts_->members[parts_->unit_number(number)];
}

Event ParameterGather::Parts::start(int unit, const Event& updated, const How& how) {
  const std::size_t u = unit_number(unit);
  Event done = lane->run(
      updated,
      [this, u, how](Communicator& /*shard_group*/, Stream& stream) { gather(u, how, stream); },
      unit);
  const std::scoped_lock lock(mutex);
  gathered[u] = done;
  return done;
}

Event ParameterGather::start(int unit, const Event& updated) {
  return parts_->start(unit, updated, {});
}

void ParameterGather::start_all(const Event& updated) {
  const Parts::How how{
      {.planned = true},
      parts_->check && parts_->check->start([parts = parts_.get()] { parts->wait_gathered(); })};
  for (int u = 0; u < unit_count(); ++u) static_cast<void>(parts_->start(u, updated, how));
}

Event ParameterGather::ready(int parameter) const {
  const int unit = parts_->unit_of[parts_->index(parameter)];
  if (unit < 0) return {};
  const std::scoped_lock lock(parts_->mutex);
  return parts_->gathered[static_cast<std::size_t>(unit)];
}

int ParameterGather::find(std::string_view name) const {
  const auto found = parts_->indices.find(name);
  if (found != parts_->indices.end()) return found->second;
  throw UsageError({.where = kWhere,
                    .expected = "a parameter that it was made with",
                    .got = "'" + std::string(name) + "'"});
}

void ParameterGather::wait(int parameter) {
  const Event event = ready(parameter);
  if (event.state() == nullptr) return;
  const double begin_s = Operations::now_s();
  const bool is_late = !event.complete();
  parts_->lane->wait(event);
  const double waited_s = Operations::now_s() - begin_s;
  const std::scoped_lock lock(parts_->mutex);
  if (is_late) parts_->stats.exposed_s += waited_s;
  // The parameter stays valid even if the world ends.
  Event& gathered = parts_->gathered[static_cast<std::size_t>(
      parts_->unit_of[static_cast<std::size_t>(parameter)])];
  if (gathered.state() == event.state()) gathered = {};
}

void ParameterGather::wait_all() {
  for (const std::vector<int>& unit : parts_->members) wait(unit.front());
}

void ParameterGather::wait(int parameter, Stream& reader) const { reader.wait(ready(parameter)); }

void ParameterGather::rebind(int parameter, TensorView array) {
  const std::size_t index = parts_->index(parameter);
  GatheredParameter& one = parts_->parameters[index];
  if (array.count != one.array.count || array.dtype != one.array.dtype ||
      array.device != one.array.device) {
    throw UsageError({.where = std::string(kWhere) + ": array of '" + one.name + "'",
                      .expected = to_string(one.array) + ", as before",
                      .got = to_string(array)});
  }
  one.array = array;
  const int unit = parts_->unit_of[index];
  if (unit < 0) return;
  const std::vector<int>& members = parts_->members[static_cast<std::size_t>(unit)];
  const auto place = std::find(members.begin(), members.end(), parameter) - members.begin();
  parts_->units[static_cast<std::size_t>(unit)][static_cast<std::size_t>(place)].array = array;
}

void ParameterGather::fence(Stream& writer) const {
  std::vector<Event> gathered;
  {
    const std::scoped_lock lock(parts_->mutex);
    gathered = parts_->gathered;
  }
  for (const Event& one : gathered) writer.wait(one);
}

GatherStats ParameterGather::stats() const {
  const std::scoped_lock lock(parts_->mutex);
  return parts_->stats;
}

std::vector<GatherTime> ParameterGather::last_times() const {
  const std::scoped_lock lock(parts_->mutex);
  return parts_->times;
}

}  // namespace hsdp::zero
