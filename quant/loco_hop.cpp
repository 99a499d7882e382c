#include "quant/loco_hop.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "hsdp/error.h"
#include "hsdp/log.h"
#include "quant/hop_errors.h"
#include "quant/hop_figures.h"
#include "quant/hop_state.h"
#include "quant/loco_exchange.h"

namespace hsdp::quant {
namespace {

constexpr std::int64_t kHostWindowElements = 1 << 20;
constexpr std::int64_t kCudaWindowElements = 1 << 24;

ExchangeFormats formats_of(const LocoOptions& options) {
  const Code code = options.bits == 4 ? Code::kInt4 : Code::kInt8;
  return {{code, options.group_size, options.scale_dtype},
          {options.gather.value_or(code), options.group_size, options.scale_dtype}};
}

std::vector<std::string> names_of(const HopPlan& plan) {
  std::vector<std::string> names;
  for (const HopParameter& parameter : plan.parameters) names.push_back(parameter.name);
  return names;
}

std::vector<GroupMap> maps_of(std::span<const LocoWindow> windows) {
  std::vector<GroupMap> maps;
  for (const LocoWindow& window : windows) maps.push_back(window.map);
  return maps;
}

}  // namespace

struct LocoHop::Parts {
  struct BucketWindows {
    std::size_t first = 0;
    std::size_t end = 0;
    bool is_excluded = false;              // all of it
    std::vector<ParameterRange> excluded;  // of it, else: whole rows of replica_hook have both
  };
  struct Kept {
    SavedState state;
    bool strict = true;
  };

  explicit Parts(LocoOptions options_)
      : options(std::move(options_)), formats(formats_of(options)) {}

  [[nodiscard]] bool warms_up() const { return steps < options.warmup_steps; }
  [[nodiscard]] bool starts_afresh() const {
    return options.reset_T > 0 && steps > 0 && steps % options.reset_T == 0;
  }
  [[nodiscard]] bool is_plain(int bucket) const {
    return warms_up() || buckets[static_cast<std::size_t>(bucket)].is_excluded;
  }
  [[nodiscard]] bool takes_figures() const {
    return options.error_every > 0 && steps % options.error_every == 0;
  }
  void require_patterns_match(const HopPlan& plan);
  // How a plan's buckets travel.
  struct LaidOut {
    ExchangeFormats formats;
    std::vector<BucketWindows> buckets;
    std::vector<LocoWindow> windows;
  };
  // `tables`: where the windows' tables are to be.
  [[nodiscard]] LaidOut lay_out(const HopPlan& plan, Device tables) const;
  [[nodiscard]] std::vector<AllReduce> excluded_sums(const HopPlan& plan) const;
  [[nodiscard]] PlainScatter plain_scatter(const HopPlan& plan,
                                           const std::vector<BucketWindows>& its_buckets) const;
  [[nodiscard]] HopErrors::Kind kind_of_errors(const ExchangeFormats& its_formats) const;
  [[nodiscard]] std::unique_ptr<HopErrors> new_errors(const HopPlan& plan) const;
  void take_errors_along();
  void move_errors();
  void take_figures();

  // Called between steps.
  void require_no_step(const char* what) const;
  [[nodiscard]] HopErrors* current() const { return before ? before.get() : errors.get(); }
  [[nodiscard]] SavedHeader make_header() const {
    return {steps, current() ? current()->replicas() : replicas, options.group_size,
            options.err_beta};
  }
  void put_back(const Kept& from);

  LocoOptions options;
  ExchangeFormats formats;
  std::atomic<std::int64_t> steps = 0;
  std::atomic<bool> in_step = false;  // a reduction began; the step's outcome is unknown
  std::uint32_t scaled = 0;           // hash of the factors given to scale_errors()
  Reduction reduction = Reduction::kExact;
  std::vector<std::string> names;
  std::map<std::string, std::int64_t> counts;  // elements per parameter
  std::set<std::string> matched;               // patterns that have matched
  std::vector<BucketWindows> buckets;
  std::vector<AllReduce> sums;         // of excluded buckets, as they will be called
  std::optional<PlainScatter> plain;   // where each replica keeps its part
  std::vector<std::uint32_t> repeats;  // of each bucket, in the step under way
  Communicator scatter;
  Communicator gather;
  int replicas = 0;                   // 0: never bound; 1: unused
  std::unique_ptr<HopErrors> errors;  // null: no error feedback
  // The errors of the previous buckets. The first reduction with the new ones exchanges those that
  // change owners, since all replicas take part in it.
  std::unique_ptr<HopErrors> before;
  std::atomic<bool> moves = false;  // before != nullptr, as of the start of the step
  std::optional<Kept> kept;         // loaded before bind(), until the first reduction
  HopFigures figures;
  bool has_warned = false;
  std::mutex mutex;  // guards the next member
  std::vector<QuantizationError> quantization_error;
  SavedHeader header;  // state() points into it
  std::unique_ptr<LocoExchange> exchange;
};

LocoHop::LocoHop(LocoOptions options) {
  require_valid(options);
  std::ranges::sort(options.exclude);
  options.exclude.erase(std::unique(options.exclude.begin(), options.exclude.end()),
                        options.exclude.end());
  parts_ = std::make_unique<Parts>(std::move(options));
}

LocoHop::~LocoHop() = default;

const LocoOptions& LocoHop::options() const { return parts_->options; }

std::int64_t LocoHop::steps() const {
  const Parts& parts = *parts_;
  return parts.kept && !parts.scatter ? parts.kept->state.header().steps : parts.steps.load();
}

std::string LocoHop::describe() const { return quant::describe(parts_->options); }

// Differs between ranks whose errors have diverged.
std::string LocoHop::word() const {
  std::string text = std::to_string(parts_->steps) + " steps";
  if (parts_->scaled != 0) {
    char factors[16];
    std::snprintf(factors, sizeof factors, " x%08x", parts_->scaled);
    text += factors;
  }
  if (parts_->moves) text += " moved";
  return text;
}

std::optional<Dtype> LocoHop::wire() const { return parts_->options.plain_dtype; }

bool LocoHop::needs_gather_group() const { return parts_->formats.gathers; }

std::int64_t LocoHop::slice_multiple() const { return parts_->options.group_size; }

int LocoHop::bucket_class(const HopParameter& parameter) const {
  return is_excluded(parts_->options, parameter.name) || parameter.dtype == Dtype::kF64 ? 1 : 0;
}

// Each pattern has to match once: its parameters may be frozen later.
void LocoHop::Parts::require_patterns_match(const HopPlan& plan) {
  for (const std::string& pattern : options.exclude) {
    LocoOptions one;
    one.exclude = {pattern};
    if (std::ranges::any_of(plan.parameters, [&one](const HopParameter& parameter) {
          return quant::is_excluded(one, parameter.name);
        })) {
      matched.insert(pattern);
    }
    if (matched.contains(pattern)) continue;
    throw UsageError({.where = "loco: exclude",
                      .expected = "names or patterns of parameters",
                      .got = "'" + pattern + "', which matches none",
                      .remedy = "use names as registered, such as '" +
                                (plan.parameters.empty() ? "" : plan.parameters.front().name) +
                                "'"});
  }
}

LocoHop::Parts::LaidOut LocoHop::Parts::lay_out(const HopPlan& plan, Device tables) const {
  const std::int64_t window_elements =
      plan.device.type == DeviceType::kHost ? kHostWindowElements : kCudaWindowElements;
  LaidOut laid{.formats = formats};
  laid.formats.gathers = plan.cuts.empty();
  std::vector<LocoWindow>& windows = laid.windows;
  for (std::size_t b = 0; b < plan.ranges.size(); ++b) {
    BucketWindows bucket{.first = windows.size()};
    std::vector<ParameterRange> quantized;
    for (const ParameterRange& range : plan.ranges[b]) {
      const auto p = static_cast<std::size_t>(range.parameter);
      const bool is_plain = quant::is_excluded(options, plan.parameters[p].name) ||
                            plan.parameters[p].dtype == Dtype::kF64;
      if (range.count > 0) (is_plain ? bucket.excluded : quantized).push_back(range);
    }
    bucket.is_excluded = quantized.empty() && !bucket.excluded.empty();
    const int size = options.group_size;
    const RowCut* const cut = laid.formats.gathers ? nullptr : &plan.cuts[b];
    for (std::vector<ParameterRange>& runs :
         cut ? cut_into_windows(quantized, size, window_elements, *cut)
             : cut_into_windows(quantized, size, window_elements)) {
      GroupMap map = cut ? GroupMap(runs, size, *cut) : GroupMap(runs, size, plan.replicate_size);
      windows.emplace_back(std::move(runs), std::move(map), laid.formats, tables);
    }
    bucket.end = windows.size();
    laid.buckets.push_back(std::move(bucket));
  }
  return laid;
}

std::vector<AllReduce> LocoHop::Parts::excluded_sums(const HopPlan& plan) const {
  std::vector<AllReduce> calls;
  for (std::size_t b = 0; b < plan.data.size(); ++b) {
    if (!buckets[b].is_excluded) continue;
    for (const TensorView& data : plan.data[b]) {
      calls.push_back({.data = data, .wire = plan.wires[b], .reduction = plan.reduction});
    }
  }
  return calls;
}

PlainScatter LocoHop::Parts::plain_scatter(const HopPlan& plan,
                                           const std::vector<BucketWindows>& its_buckets) const {
  std::vector<std::optional<Dtype>> wires(plan.wires.begin(), plan.wires.end());
  for (std::size_t b = 0; b < wires.size(); ++b) {
    if (!its_buckets[b].is_excluded && options.warmup_steps == 0) wires[b].reset();
  }
  return PlainScatter(plan, wires);
}

HopErrors::Kind LocoHop::Parts::kind_of_errors(const ExchangeFormats& its_formats) const {
  return {.dtype = options.error_dtype,
          .group_size = options.group_size,
          .beta = options.err_beta,
          .gathered = its_formats.gathers && its_formats.gathered.code != Code::kBf16};
}

std::unique_ptr<HopErrors> LocoHop::Parts::new_errors(const HopPlan& plan) const {
  if (!options.error_feedback) return nullptr;
  return std::make_unique<HopErrors>(kind_of_errors(formats), plan, names,
                                     maps_of(exchange->windows()));
}

HopNeed LocoHop::need(const HopPlan& plan) const {
  const Parts& parts = *parts_;
  const Parts::LaidOut laid = parts.lay_out(plan, {});
  const ExchangeNeed exchange = exchange_need(laid.windows, laid.formats, plan.device);
  HopNeed need{.staging_bytes = exchange.staging(), .wire_bytes = exchange.wire};
  if (parts.options.error_feedback) {
    need.state_bytes = HopErrors::bytes(parts.kind_of_errors(laid.formats), maps_of(laid.windows));
  }
  if (!laid.formats.gathers) {
    need.state_bytes += parts.plain_scatter(plan, laid.buckets).need().state_bytes;
  }
  for (std::size_t b = 0; b < laid.buckets.size(); ++b) {
    const Parts::BucketWindows& bucket = laid.buckets[b];
    std::int64_t count = bucket.is_excluded ? plan.data[b].front().count : 0;
    if (!bucket.is_excluded) {
      for (const ParameterRange& range : bucket.excluded) count += range.count;
    }
    need.wire_bytes +=
        (laid.formats.gathers ? 2 : 1) * message_bytes(count, plan.wires[b], plan.reduction);
  }
  return need;
}

void LocoHop::prepare(const HopPlan& plan) {
  Parts& parts = *parts_;
  parts.require_patterns_match(plan);
  if (parts.exchange) parts.exchange->finish();
  if (parts.errors && parts.steps > 0 && !parts.before) parts.before = std::move(parts.errors);
  parts.errors.reset();
  parts.exchange.reset();
  parts.plain.reset();
  parts.names = names_of(plan);
  parts.counts.clear();
  for (const HopParameter& parameter : plan.parameters) {
    parts.counts[parameter.name] = element_count(parameter.shape);
  }
  parts.reduction = plan.reduction;
  Parts::LaidOut laid = parts.lay_out(plan, plan.device);
  parts.formats = laid.formats;
  parts.buckets = std::move(laid.buckets);
  parts.repeats.assign(parts.buckets.size(), 0);
  parts.exchange = std::make_unique<LocoExchange>(std::move(laid.windows), parts.formats,
                                                  plan.device, plan.memory);
  if (parts.formats.gathers) {
    parts.sums = parts.excluded_sums(plan);
  } else {
    parts.sums.clear();
    parts.plain = parts.plain_scatter(plan, parts.buckets);
  }
  parts.errors = parts.new_errors(plan);
  parts.figures = HopFigures(parts.names, maps_of(parts.exchange->windows()), parts.formats.gathers,
                             plan.device);
  if (!parts.scatter) return;
  parts.exchange->bind(parts.scatter, parts.gather);
  parts.take_errors_along();
}

void LocoHop::bind(Communicator scatter, Communicator gather) {
  Parts& parts = *parts_;
  parts.scatter = std::move(scatter);
  parts.gather = std::move(gather);
  if (!parts.exchange) return;  // prepare() failed
  parts.exchange->bind(parts.scatter, parts.gather);
  if (!parts.scatter) return parts.plain.reset();
  if (parts.plain) parts.plain->bind(parts.scatter);
  if (!parts.sums.empty()) parts.scatter.reserve(parts.sums);
  parts.take_errors_along();
  parts.replicas = parts.scatter.size();
}

void LocoHop::set_unused() {
  Parts& parts = *parts_;
  if (parts.scatter) return;  // in use by another owner, which has several replicas
  if (parts.kept) parts.steps = parts.kept->state.header().steps;
  parts.kept.reset();
  parts.before.reset();
  parts.errors.reset();
  parts.exchange.reset();
  parts.moves = false;
  parts.replicas = 1;
}

void LocoHop::Parts::take_errors_along() {
  if (errors) errors->set_replica(scatter.rank());
  if (kept) {
    put_back(*kept);
  } else if (before) {
    before->require_fits(*errors);
    before->reserve_to_join();  // here a failure reaches every rank
  }
  moves = before != nullptr;
}

bool LocoHop::means(int bucket, double mean_divisor) const {
  parts_->in_step = true;
  if (parts_->is_plain(bucket)) return false;
  const double magnitude = std::abs(mean_divisor);
  if (magnitude >= 0x1p-100 && magnitude <= 0x1p100) return true;
  throw UsageError({.where = "loco: divide factor times loss scale",
                    .expected = "a magnitude from 2^-100 to 2^100",
                    .got = number_text(mean_divisor),
                    .remedy = "choose another factor or scale"});
}

// Collective over the replicas.
void LocoHop::Parts::move_errors() {
  if (!before) return;
  // Without a gathered half this is the owner's first reduction, and nothing runs on `scatter`.
  const SavedState saved = before->joined(gather ? gather : scatter, make_header());
  errors->load(saved, false);
  before.reset();
}

Event LocoHop::reduce(const HopBucket& bucket, Stream& stream) {
  Parts& parts = *parts_;
  parts.in_step = true;
  parts.kept.reset();
  parts.move_errors();
  const Event ready = stream.record();
  if (parts.is_plain(bucket.bucket)) {
    if (parts.plain) return parts.exchange->reduce_scatter(*parts.plain, bucket, ready);
    return parts.exchange->all_reduce(plain_sum(bucket, parts.reduction), ready);
  }
  const auto number = static_cast<std::size_t>(bucket.bucket);
  const Parts::BucketWindows& windows = parts.buckets[number];
  for (const ParameterRange& range : windows.excluded) {
    AllReduce sum = plain_sum(bucket, parts.reduction);
    sum.data = bucket.data.slice(range.offset, range.count);
    static_cast<void>(parts.exchange->all_reduce(sum, ready));
  }
  LocoExchange::Arguments arguments{.bucket = bucket,
                                    .beta = static_cast<float>(parts.options.err_beta),
                                    .dithers = parts.options.stochastic_error,
                                    .seed = parts.options.seed,
                                    .step = static_cast<std::uint32_t>(parts.steps),
                                    .repeat = parts.repeats[number]++};
  if (parts.plain) {
    arguments.part_begin = parts.plain->cut(bucket.bucket).begin(parts.exchange->replica());
  }
  for (std::size_t w = windows.first; w < windows.end; ++w) {
    LocoExchange::Errors errors;
    if (parts.errors) errors = parts.errors->next(w, parts.starts_afresh(), *parts.exchange);
    if (parts.takes_figures()) {
      const HopFigures::Window figures = parts.figures.next(w);
      arguments.scattered_figures = figures.scattered;
      arguments.gathered_figures = figures.gathered;
    }
    parts.exchange->reduce(w, arguments, errors, ready);
  }
  return parts.exchange->decoded();  // after the plain sums, which precede the first window
}

void LocoHop::end_step(const StepEnd& end) {
  Parts& parts = *parts_;
  const bool clean = end.outcome == StepOutcome::kClean;
  const bool takes_figures = clean && parts.takes_figures();
  const bool waits = end.outcome == StepOutcome::kDropped || takes_figures;
  if (waits && parts.exchange) parts.exchange->finish();
  if (takes_figures) {
    parts.take_figures();
  } else {
    parts.figures.drop();
  }
  if (parts.errors) parts.errors->end_step(clean, parts.starts_afresh(), *parts.exchange);
  if (clean) ++parts.steps;
  std::ranges::fill(parts.repeats, 0U);
  parts.moves = parts.before != nullptr;
  parts.in_step = false;
}

void LocoHop::Parts::take_figures() {
  std::vector<QuantizationError> taken = figures.take(scatter.rank());
  if (taken.empty()) return;
  const auto error_of = [](const QuantizationError& one) {
    return std::max(one.scattered, one.gathered);
  };
  const QuantizationError& worst = *std::ranges::max_element(taken, {}, error_of);
  if (error_of(worst) > kHighError && !std::exchange(has_warned, true)) {
    std::array<char, 16> change{};
    std::snprintf(change.data(), change.size(), "%.2f", error_of(worst));
    log_line(LogLevel::kWarning, "loco: '" + worst.parameter +
                                     "': quantization changed its gradient by " + change.data() +
                                     " of its norm in step " + std::to_string(steps.load()) +
                                     ": expected 0.08 to 0.17; name it in exclude, or use a "
                                     "smaller group_size or bits=8");
  }
  const std::scoped_lock lock(mutex);
  quantization_error = std::move(taken);
}

std::vector<QuantizationError> LocoHop::quantization_error() const {
  const std::scoped_lock lock(parts_->mutex);
  return parts_->quantization_error;
}

void LocoHop::Parts::require_no_step(const char* what) const {
  if (in_step) {
    throw UsageError({.where = std::string("loco: ") + what,
                      .expected = "a call between steps",
                      .got = "one in a step whose end is not known yet",
                      .remedy =
                          "read the step's result or call finish() on the Reducer first, after "
                          "a drop too; close() it where the world has failed"});
  }
  if (exchange) exchange->finish();  // errors may still be being cleared
}

std::vector<HopState> LocoHop::state() {
  Parts& parts = *parts_;
  parts.require_no_step("state");
  std::vector<HopState> all;
  if (parts.kept && !parts.scatter) {
    parts.kept->state.append_to(all);
    return all;
  }
  if (parts.replicas == 0) return {};
  parts.header = parts.make_header();
  if (const HopErrors* const errors = parts.current()) all = errors->state();
  append(parts.header, all);
  return all;
}

void LocoHop::load_state(std::span<const HopState> state, bool strict) {
  Parts& parts = *parts_;
  parts.require_no_step("load_state");
  Parts::Kept from{SavedState(state), strict};
  if (parts.replicas == 1) {
    parts.steps = from.state.header().steps;
  } else if (parts.scatter && parts.exchange) {
    parts.put_back(from);
    parts.kept.reset();
    parts.moves = false;
  } else {
    parts.kept = std::move(from);
  }
  parts.scaled = 0;
}

void LocoHop::Parts::put_back(const Kept& from) {
  const bool is_of_one = from.state.header().replicas == 1;  // one replica keeps no errors
  if (from.strict) from.state.require_parts_of(counts);
  if (errors) errors->load(from.state, from.strict && !is_of_one);
  steps = from.state.header().steps;
  before.reset();
}

std::vector<std::string> LocoHop::keys_to_load(std::span<const SavedKey> keys) const {
  const HopErrors* const errors = parts_->scatter ? parts_->errors.get() : nullptr;
  const HopErrors::Places places = errors ? errors->places() : HopErrors::Places();
  std::int64_t replicas = 1;
  std::map<std::string, std::int64_t> counts;
  for (const SavedKey& one : keys) {
    const std::optional<ErrorKey> key = parse_error_key(one.key);
    if (!key) continue;
    replicas = std::max<std::int64_t>(replicas, key->place.replica + 1);
    if (key->kind != "scales") counts[error_key(key->place, "")] = one.count;
  }
  const auto overlaps = [&](const ErrorPlace& saved, const ErrorPlace& own) {
    if (std::max(saved.flat_offset, own.flat_offset) >=
        std::min(saved.flat_offset + saved.count, own.flat_offset + own.count)) {
      return false;
    }
    const bool is_gathered = saved.replica == ErrorPlace::kGathered;
    if (is_gathered || own.replica == ErrorPlace::kGathered) return saved.replica == own.replica;
    return takes_over(saved.replica, replicas, own.replica, errors->replicas());
  };
  std::vector<std::string> wanted;
  for (const SavedKey& one : keys) {
    std::optional<ErrorKey> key = parse_error_key(one.key);
    bool is_wanted = !key || (errors == nullptr && parts_->replicas != 1);
    if (!is_wanted && errors != nullptr) {
      key->place.count = counts[error_key(key->place, "")];  // scales: that of the codes
      const auto own = places.find(key->place.parameter);
      is_wanted =
          own != places.end() && std::ranges::any_of(own->second, [&](const ErrorPlace& place) {
            return overlaps(key->place, place);
          });
    }
    if (is_wanted) wanted.push_back(one.key);
  }
  return wanted;
}

void LocoHop::scale_errors(float factor) {
  Parts& parts = *parts_;
  if (!(std::abs(factor) <= 1.0F)) {
    throw UsageError({.where = "loco: scale_errors",
                      .expected = "a factor of magnitude at most 1",
                      .got = std::to_string(factor)});
  }
  parts.require_no_step("scale_errors");
  if (!parts.kept && parts.replicas <= 1) return;                                // none
  parts.scaled = parts.scaled * 31U + std::bit_cast<std::uint32_t>(factor) + 1;  // never 0 at first
  if (parts.kept) parts.kept->state.scale(factor);
  if (const HopErrors* const errors = parts.replicas > 0 ? parts.current() : nullptr) {
    errors->scale(factor);
  }
}

}  // namespace hsdp::quant
