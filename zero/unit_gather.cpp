#include "zero/unit_gather.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hsdp/comm/operation_record.h"
#include "hsdp/device/scratch.h"
#include "hsdp/error.h"
#include "hsdp/index_check.h"
#include "hsdp/reducer/slice_gather.h"
#include "hsdp/reducer_internal.h"
#include "hsdp/row_cut.h"
#include "zero/round_records.h"
#include "zero/stored_slice.h"
#include "zero/unit_check.h"

namespace hsdp::zero {
namespace unit_gather {  // not unnamed, as UnitGather::Parts has members of these types

struct Part {
  UnitParameter parameter;
  RowCut cut;
};

struct Unit {
  std::string name;
  std::string_view act;  // its gather, in errors
  std::vector<Part> parts;
  std::vector<std::vector<std::size_t>> messages;  // parts that travel together
  Event gathered;                                  // of the last round that this rank asked for
};

}  // namespace unit_gather

namespace {

using reducer::CutArray;
using unit_gather::Part;
using unit_gather::Unit;

constexpr const char* kUnitWhere = "zero: unit gather";
constexpr std::int64_t kAlignment = 64;

// What a rank says in a round: the number of the unit that it wants, or one of these.
constexpr int kNone = -1;    // it wants nothing for now
constexpr int kUpdate = -2;  // it wants nothing before the next update

// What the ranks say in a round: those of the shard group, on a GPU those of the mesh.
struct Said {
  std::set<int> words;
  bool wanted_alike = false;  // in this pass so far
  [[nodiscard]] bool want_nothing() const { return *words.rbegin() < 0; }
  // The unit that all ranks want.
  [[nodiscard]] std::optional<int> common_unit() const {
    return words.size() == 1 && !want_nothing() ? std::optional(*words.begin()) : std::nullopt;
  }
};

std::string bit_of(int word, std::size_t unit_count) {
  const auto bit = static_cast<std::size_t>(word - kUpdate);
  std::string bits((unit_count - kUpdate + 7) / 8, '\0');
  bits[bit / 8] = static_cast<char>(1U << bit % 8);
  return bits;
}

std::set<int> words_in(const std::string& bits) {
  std::set<int> words;
  for (std::size_t bit = 0; bit < 8 * bits.size(); ++bit) {
    const auto byte = static_cast<unsigned char>(bits[bit / 8]);
    if ((byte >> bit % 8 & 1U) != 0) words.insert(static_cast<int>(bit) + kUpdate);
  }
  return words;
}

// The thread that watches a GPU may use the text when the gather is gone.
std::string_view kept_for_good(const std::string& text) {
  static std::mutex mutex;
  static auto* const all = new std::set<std::string>;  // outlives static objects
  const std::scoped_lock lock(mutex);
  return *all->insert(text).first;
}

std::int64_t size_of(const UnitParameter& parameter) {
  return parameter.count * static_cast<std::int64_t>(size_bytes(parameter.dtype));
}

void require_stored(const UnitParameter& one, bool is_registered, std::int64_t count,
                    Device device) {
  const std::string where =
      std::string(kUnitWhere) + ": slice of '" + one.name + "'" +
      (is_registered ? "" : ", which is not registered with the Reducer and so is cut evenly");
  const TensorView& stored = one.stored;
  const ConstTensorView wanted(nullptr, count, one.dtype, device);
  if (stored.count == count && stored.device == device && stored.dtype == one.dtype &&
      (stored.data != nullptr || count == 0)) {
    return;
  }
  if (stored.dtype == one.dtype || stored.device != device ||
      (stored.data == nullptr && count > 0)) {
    throw UsageError({.where = where,
                      .expected = to_string(wanted) + ", this rank's slice",
                      .got = to_string(stored)});
  }
  require_master(where, stored, count, one.dtype, device);
}

// Parameters that share a message are in the first one.
std::vector<std::vector<std::size_t>> messages_of(const BucketLayout& layout,
                                                  std::span<const Part> parts,
                                                  std::span<const std::optional<int>> registered) {
  std::vector<std::vector<std::size_t>> messages(1);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::int64_t size = size_of(parts[p].parameter);
    if (size == 0) continue;
    if (reducer::shares_message(layout, registered[p], size)) {
      messages.front().push_back(p);
    } else {
      messages.push_back({p});
    }
  }
  if (messages.front().empty()) messages.erase(messages.begin());
  return messages;
}

}  // namespace

struct UnitGather::Parts {
  explicit Parts(Reducer& its_reducer)
      : layout((its_reducer.prepare(), its_reducer.layout())),
        parts(ReducerInternal(its_reducer).slice_parts()),
        shard_size(layout.shard_size() / parts),
        memory(ReducerInternal(its_reducer).memory_count()),
        device(its_reducer.device()) {}

  // Checks everything. Returns the lines that all ranks must agree on.
  std::vector<std::string> prepare(Reducer& reducer, std::vector<ParameterUnit> given);
  [[nodiscard]] std::int64_t message_bytes() const;
  void make_check(const Reducer& reducer, const std::string& key);
  // Compares what the last step has gathered. `last`: the last round.
  void before_update(const Event& last);
  Unit& at(int unit);
  // Gathers in a round of the record, or in one in which the ranks ask each other.
  Event gather(int unit, std::vector<TensorView> arrays);
  // Takes part in rounds until all ranks want nothing for now, or before the next update.
  Event rounds_until(int own, bool until_update);

  // The next round of the lane: its Event, and what the ranks say.
  struct Asked {
    Event done;
    std::shared_future<Said> said;
  };
  Asked ask(int own, std::vector<TensorView> arrays);
  // Waits; meanwhile this thread gives other lanes what they need first.
  static const Said& hear(const Asked& asked) {
    static_cast<void>(asked.done.enqueued());
    return asked.said.get();
  }
  // Takes part in that many rounds of the record without wanting their units.
  void follow(std::ptrdiff_t count);
  // Waits for the first round of this pass.
  void hear_opening();
  // Gives the lane a round that may read slices of these units.
  Event run(int first, int end, GatherLane::Task task);

  // Runs on the lane.
  Said round(int own, std::uint64_t wanted, std::span<const TensorView> arrays, Communicator& group,
             Stream& stream);
  [[nodiscard]] std::set<int> words_of(int own, Communicator& group, std::string_view act);
  // The Events after which a round may read slices of these units; on a GPU, of enqueued work.
  [[nodiscard]] std::vector<Event> arrived(int first, int end) const;
  // Gathers the unit into memory that is not read.
  void take_part(const Unit& unit, Communicator& group, Stream& stream);
  void fill(const Unit& unit, std::span<const TensorView> arrays, Communicator& group,
            Stream& stream);

  const BucketLayout& layout;
  const int parts;  // of a shard rank's slices
  const int shard_size;
  MemoryCount memory;
  Device device;
  std::vector<Unit> units;
  MemoryCount::Held expected;                            // messages
  std::function<std::vector<Event>(int unit)> arrivals;  // may be empty
  std::optional<UnitCheck> check;                        // for verify_every
  std::optional<std::int64_t> compared;  // the step of the lane's round if it is compared
  Event updated;                         // the rounds that this thread gives come after it
  RoundRecords records;
  Asked opening;  // the first round of this pass, until hear_opening()
  bool in_pass = false;
  mutable std::mutex mutex;
  GatherStats stats;
  std::unique_ptr<GatherLane> lane;  // last, as its tasks use the rest
};

std::vector<std::string> UnitGather::Parts::prepare(Reducer& reducer,
                                                    std::vector<ParameterUnit> given) {
  std::unordered_map<std::string_view, int> numbers;  // of registration
  for (const ParameterSpec& spec : reducer.parameters()) {
    numbers.emplace(spec.name, static_cast<int>(numbers.size()));
  }
  std::vector<std::string> lines;
  for (ParameterUnit& unit : given) {
    Unit& mine = units.emplace_back();
    mine.name = std::move(unit.name);
    mine.act = kept_for_good("gather '" + mine.name + "'");
    lines.push_back("unit '" + mine.name + "'");
    std::vector<std::optional<int>> registered;
    for (UnitParameter& one : unit.parameters) {
      const auto found = numbers.find(one.name);
      std::optional<int>& number = registered.emplace_back();
      if (found != numbers.end()) number = found->second;
      RowCut cut = number ? layout.slices(*number).joined(parts) : RowCut(one.count, shard_size);
      if (cut.count() != one.count) {
        throw UsageError({.where = std::string(kUnitWhere) + ": '" + one.name + "'",
                          .expected = std::to_string(cut.count()) + " elements, as registered",
                          .got = std::to_string(one.count)});
      }
      require_stored(one, number.has_value(), cut.length(reducer.shard_rank()), device);
      lines.push_back("'" + one.name + "' " + std::to_string(one.count) + " " +
                      std::string(name(one.dtype)) + (number ? "" : " without gradients"));
      mine.parts.push_back({std::move(one), std::move(cut)});
    }
    mine.messages = messages_of(layout, mine.parts, registered);
  }
  expected = memory.expect(MemoryKind::kParameterGather, message_bytes());
  return lines;
}

// The size of the largest message.
std::int64_t UnitGather::Parts::message_bytes() const {
  std::int64_t most = 0;
  for (const Unit& unit : units) {
    for (const std::vector<std::size_t>& message : unit.messages) {
      std::vector<CutArray> together;
      for (const std::size_t p : message) {
        const Part& part = unit.parts[p];
        together.push_back(
            {{nullptr, part.parameter.count, part.parameter.dtype, device}, part.cut});
      }
      most = std::max(most, reducer::gather_message_bytes(shard_size, together));
    }
  }
  return most;
}

Unit& UnitGather::Parts::at(int unit) {
  return units[check_index(kUnitWhere, "a unit below", unit, std::ssize(units))];
}

Said UnitGather::Parts::round(int own, std::uint64_t wanted, std::span<const TensorView> arrays,
                              Communicator& group, Stream& stream) {
  const std::string_view act = own < 0 ? "end the gathers of units" : at(own).act;
  // In each group these sum to zero if its ranks have made the same calls.
  const auto calls = static_cast<std::int64_t>(group.call_hash() & 0xffffffffU);
  const auto bits = static_cast<std::int64_t>(wanted);
  const comm::Agreement all =
      lane->agree({.any = bit_of(own, units.size()),
                   .sum = {group.rank() == 0 ? calls * (group.size() - 1) : -calls},
                   .most = {bits, ~bits}},
                  act);
  if (all.sum.front() != 0) group.compare_calls(group.next_exchange_key());
  Said said{words_in(all.any), all.most[0] == ~all.most[1]};
  const bool is_of_group = said.words.size() == 1 || stream.device().type == DeviceType::kHost;
  for (const int word : is_of_group ? said.words : words_of(own, group, act)) {
    if (word < 0) continue;
    if (word == own) {
      fill(at(word), arrays, group, stream);
    } else {
      take_part(at(word), group, stream);
    }
  }
  return said;
}

// The words of the ranks of this group.
std::set<int> UnitGather::Parts::words_of(int own, Communicator& group, std::string_view act) {
  const std::string key = group.next_exchange_key();
  group.post(key, {.any = bit_of(own, units.size())});
  return words_in(group.collect(key, act).any);
}

UnitGather::Parts::Asked UnitGather::Parts::ask(int own, std::vector<TensorView> arrays) {
  auto result = std::make_shared<std::promise<Said>>();
  Asked asks{{}, result->get_future().share()};
  if (!in_pass) {
    opening.said = asks.said;
  } else if (own >= 0) {
    if (records.follows()) lane->stop_repeating();
    records.depart();
  }
  // The round may serve any unit.
  asks.done = run(0, static_cast<int>(std::ssize(units)),
                  [this, own, wanted = records.hash(), arrays = std::move(arrays),
                   result = std::move(result)](Communicator& group, Stream& stream) {
                    result->set_value(round(own, wanted, arrays, group, stream));
                  });
  if (!std::exchange(in_pass, true)) opening.done = asks.done;
  return asks;
}

void UnitGather::Parts::hear_opening() {
  if (!opening.said.valid()) return;
  try {
    records.begin(hear(opening).common_unit());
    if (!records.follows()) lane->stop_repeating();
  } catch (const std::future_error&) {  // it did not run; the next call throws why
    in_pass = false;
  }
  opening = {};
}

void UnitGather::Parts::follow(std::ptrdiff_t count) {
  for (; count > 0; --count) {
    const int unit = records.coming().front();
    records.advance(1);
    run(unit, unit + 1,
        [this, unit](Communicator& group, Stream& stream) { take_part(at(unit), group, stream); });
  }
}

Event UnitGather::Parts::gather(int unit, std::vector<TensorView> arrays) {
  if (shard_size > 1) {
    hear_opening();
    records.want(unit);
    const auto coming = records.coming();
    const auto place = std::ranges::find(coming, unit);
    const bool is_foretold = place != coming.end();
    follow(place - coming.begin());
    if (!is_foretold) return ask(unit, std::move(arrays)).done;
    records.advance(1);
  }
  return run(unit, unit + 1,
             [this, unit, arrays = std::move(arrays)](Communicator& group, Stream& stream) {
               fill(at(unit), arrays, group, stream);
             });
}

Event UnitGather::Parts::run(int first, int end, GatherLane::Task task) {
  return lane->run(updated, [this, step = check ? check->step_of_gather() : std::nullopt,
                             after = arrived(first, end),
                             task = std::move(task)](Communicator& group, Stream& stream) {
    stream.wait_in_task(after);
    compared = step;
    task(group, stream);
  });
}

std::vector<Event> UnitGather::Parts::arrived(int first, int end) const {
  std::vector<Event> events;
  for (int unit = first; arrivals && unit < end; ++unit) {
    for (const Event& event : arrivals(unit)) {
      if (event.state() != nullptr) events.push_back(event.enqueued());
    }
  }
  return events;
}

void UnitGather::Parts::take_part(const Unit& unit, Communicator& group, Stream& stream) {
  std::int64_t size = 0;
  std::vector<std::int64_t> begins;
  for (const Part& part : unit.parts) {
    begins.push_back(size);
    size += (size_of(part.parameter) + kAlignment - 1) / kAlignment * kAlignment;
  }
  const Scratch scratch(static_cast<std::size_t>(size), stream);
  const MemoryCount::Held held = memory.hold(MemoryKind::kParameterGather, size);
  std::vector<TensorView> arrays;
  for (std::size_t p = 0; p < unit.parts.size(); ++p) {
    const UnitParameter& one = unit.parts[p].parameter;
    arrays.push_back({scratch.data() + begins[p], one.count, one.dtype, device});
  }
  fill(unit, arrays, group, stream);
}

void UnitGather::Parts::fill(const Unit& unit, std::span<const TensorView> arrays,
                             Communicator& group, Stream& stream) {
  std::int64_t gathers = 0;
  std::int64_t bytes = 0;
  for (const std::vector<std::size_t>& message : unit.messages) {
    std::vector<CutArray> together;
    for (const std::size_t p : message) {
      const Part& part = unit.parts[p];
      round_into(part.parameter.stored,
                 arrays[p].slice(part.cut.begin(group.rank()), part.cut.length(group.rank())),
                 stream);
      together.push_back({arrays[p], part.cut});
      bytes += size_of(part.parameter);
    }
    gathers +=
        reducer::gather_arrays(group, together, memory, stream, {.planned = true, .act = unit.act});
  }
  if (compared) {
    check->gathered(static_cast<std::size_t>(&unit - units.data()), *compared, arrays, stream);
  }
  const std::scoped_lock lock(mutex);
  stats.gather_count += gathers;
  if (gathers > 0) stats.bytes += bytes;
}

void UnitGather::Parts::make_check(const Reducer& reducer, const std::string& key) {
  if (ReducerInternal(reducer).verify_every() == 0) return;
  std::vector<UnitCheck::Unit> checked;
  for (const Unit& unit : units) {
    checked.push_back({.name = unit.name});
    for (const Part& part : unit.parts) checked.back().parameters.push_back(part.parameter.name);
  }
  check.emplace(reducer, key, std::move(checked));
}

void UnitGather::Parts::before_update(const Event& last) {
  if (!check || !check->is_due()) return;
  if (last.state() != nullptr) lane->wait(last);
  for (const Unit& unit : units) {
    if (unit.gathered.state() != nullptr) lane->wait(unit.gathered);
  }
  check->before_update();
}

Event UnitGather::Parts::rounds_until(int own, bool until_update) {
  if (shard_size == 1) return {};
  for (;;) {
    hear_opening();
    follow(std::ssize(records.coming()));
    const Asked asks = ask(own, {});
    try {
      const Said& said = hear(asks);
      if (!said.want_nothing()) {
        records.depart();
        continue;
      }
      opening = {};
      in_pass = false;
      records.end(said.wanted_alike);
      if (!until_update || !said.words.contains(kNone)) return asks.done;
    } catch (const std::future_error&) {  // the task has failed, or did not run
      lane->wait(asks.done);
      throw;
    }
  }
}

UnitGather::UnitGather(Reducer& reducer, std::vector<ParameterUnit> units)
    : parts_(std::make_unique<Parts>(reducer)) {
  const ReducerInternal internal(reducer);
  const std::string key = internal.groups().world.next_exchange_key();  // by all ranks or none
  parts_->lane = internal.make_lane("hsdp-units", [&] {
    std::vector<std::string> lines = parts_->prepare(reducer, std::move(units));
    parts_->make_check(reducer, key);
    return lines;
  });
  // If this rank skips a unit, it takes part in its round then.
  parts_->lane->on_need([parts = parts_.get()] {
    parts->hear_opening();  // its round was issued
    if (!parts->records.coming().empty()) parts->follow(1);
  });
}

UnitGather::~UnitGather() = default;

void UnitGather::read_after(std::function<std::vector<Event>(int unit)> arrivals) {
  parts_->arrivals = std::move(arrivals);
}

Slice UnitGather::even_slice(std::int64_t count, int shard_size, int shard_rank) {
  const RowCut cut(count, shard_size);
  return {cut.begin(shard_rank), cut.length(shard_rank)};
}

Event UnitGather::gather(int unit, std::vector<TensorView> arrays, const Event& updated) {
  Unit& mine = parts_->at(unit);
  const std::string where = std::string(kUnitWhere) + ": '" + mine.name + "'";
  if (arrays.size() != mine.parts.size()) {
    throw UsageError({.where = where,
                      .expected = std::to_string(mine.parts.size()) + " arrays",
                      .got = std::to_string(arrays.size())});
  }
  for (std::size_t p = 0; p < arrays.size(); ++p) {
    const UnitParameter& one = mine.parts[p].parameter;
    const TensorView& array = arrays[p];
    if (array.count == one.count && array.dtype == one.dtype && array.device == parts_->device &&
        (array.data != nullptr || array.count == 0)) {
      continue;
    }
    throw UsageError(
        {.where = where + ": array of '" + one.name + "'",
         .expected = to_string(ConstTensorView(nullptr, one.count, one.dtype, parts_->device)),
         .got = to_string(array) + (array.data == nullptr ? " without memory" : "")});
  }
  parts_->updated = updated;
  Event done = parts_->gather(unit, std::move(arrays));
  const std::scoped_lock lock(parts_->mutex);
  mine.gathered = done;
  return done;
}

bool UnitGather::comes_next(int unit) {
  parts_->hear_opening();
  const auto coming = parts_->records.coming();
  return !parts_->records.follows() || (!coming.empty() && coming.front() == unit);
}

bool UnitGather::waits_for_opening() const {
  return parts_->opening.said.valid() &&
         parts_->opening.said.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

void UnitGather::wait(int unit) {
  Unit& mine = parts_->at(unit);
  Event event;
  {
    const std::scoped_lock lock(parts_->mutex);
    event = mine.gathered;
  }
  if (event.state() == nullptr) return;
  const double begin_s = Operations::now_s();
  const bool is_late = !event.complete();
  parts_->lane->wait(event);
  const double waited_s = Operations::now_s() - begin_s;
  const std::scoped_lock lock(parts_->mutex);
  if (is_late) parts_->stats.exposed_s += waited_s;
  if (mine.gathered.state() == event.state()) mine.gathered = {};
}

void UnitGather::wait(int unit, Stream& reader) const {
  Event event;
  {
    const Unit& mine = parts_->at(unit);
    const std::scoped_lock lock(parts_->mutex);
    event = mine.gathered;
  }
  reader.wait(event);
}

Event UnitGather::end(const Event& updated) {
  parts_->updated = updated;
  return parts_->rounds_until(kNone, false);
}

Event UnitGather::begin_update(const Event& updated) {
  parts_->updated = updated;
  Event last = parts_->rounds_until(kUpdate, true);
  parts_->before_update(last);
  return last;
}

GatherStats UnitGather::stats() const {
  const std::scoped_lock lock(parts_->mutex);
  return parts_->stats;
}

}  // namespace hsdp::zero
