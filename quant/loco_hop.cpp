#include "quant/loco_hop.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "hsdp/device/copy.h"
#include "hsdp/error.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "quant/error_state.h"
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

// A state in memory of its own.
class KeptState {
 public:
  KeptState() = default;
  KeptState(std::span<const HopState> state, bool is_whole_) : is_whole(is_whole_) {
    for (HopState one : state) {
      memory_.emplace_back(one.data.device, one.data.size_in_bytes());
      Stream stream = Stream::create(one.data.device, "hsdp-loco");
      stream.run([to = memory_.back().data(), from = one.data, inside = stream.inside_task()] {
        copy_bytes(to, from.data, from.size_in_bytes(), inside);
      });
      stream.synchronize();
      one.data.data = memory_.back().data();
      state_.push_back(std::move(one));
    }
  }
  [[nodiscard]] std::span<const HopState> state() const { return state_; }
  [[nodiscard]] bool empty() const { return state_.empty(); }

  bool is_whole = false;  // has to have all that the hop keeps

 private:
  std::vector<HopState> state_;
  std::vector<Buffer> memory_;
};

}  // namespace

struct LocoHop::Parts {
  struct BucketWindows {
    std::size_t first = 0;
    std::size_t end = 0;
    bool excluded = false;
  };

  explicit Parts(LocoOptions options_)
      : options(std::move(options_)), formats(formats_of(options)) {}

  [[nodiscard]] bool warms_up() const { return steps < options.warmup_steps; }
  [[nodiscard]] bool starts_afresh() const {
    return options.reset_T > 0 && steps > 0 && steps % options.reset_T == 0;
  }
  [[nodiscard]] bool is_plain(int bucket) const {
    return warms_up() || buckets[static_cast<std::size_t>(bucket)].excluded;
  }
  void make_errors(const HopPlan& plan);
  // With the number of this replica when the errors were last in use.
  [[nodiscard]] std::vector<ErrorPiece> pieces() const;
  [[nodiscard]] std::vector<HopState> state();
  void put_back();

  LocoOptions options;
  ExchangeFormats formats;
  std::int64_t steps = 0;
  std::uint32_t scaled = 0;  // names the factors of scale_errors()
  Reduction reduction = Reduction::kExact;
  std::vector<BucketWindows> buckets;
  std::unique_ptr<LocoExchange> exchange;
  std::unique_ptr<ErrorStates> scattered;  // null: no error feedback
  std::unique_ptr<ErrorStates> gathered;   // null: none, or bf16
  MemoryCount::Held held;
  std::vector<std::string> names;
  Device device;
  Communicator scatter;
  Communicator gather;
  int replica = 0;
  KeptState kept;                      // until it can be put back
  std::vector<std::uint32_t> repeats;  // of each bucket, in the step under way
};

LocoHop::LocoHop(LocoOptions options) {
  require_valid(options);
  parts_ = std::make_unique<Parts>(std::move(options));
}

LocoHop::~LocoHop() = default;

const LocoOptions& LocoHop::options() const { return parts_->options; }

std::int64_t LocoHop::steps() const { return parts_->steps; }

std::string LocoHop::describe() const { return quant::describe(parts_->options); }

// Ranks whose errors have come apart learn it here.
std::string LocoHop::word() const {
  std::string text = std::to_string(parts_->steps) + " steps";
  if (parts_->scaled != 0) text += ", scaled " + std::to_string(parts_->scaled % 100'000);
  return text;
}

std::optional<Dtype> LocoHop::wire() const { return parts_->options.plain_dtype; }

std::int64_t LocoHop::slice_multiple() const { return parts_->options.group_size; }

int LocoHop::bucket_class(const HopParameter& parameter) const {
  return is_excluded(parts_->options, parameter.name) ? 1 : 0;
}

// The gathered half's errors are of as many elements as any replica may own.
void LocoHop::Parts::make_errors(const HopPlan& plan) {
  scattered.reset();
  gathered.reset();
  held.reset();
  if (!options.error_feedback) return;
  std::vector<ErrorStates::Extent> sent;
  std::vector<ErrorStates::Extent> owned;
  for (const LocoWindow& window : exchange->windows()) {
    sent.push_back({window.map.element_count(), window.map.group_count()});
    ErrorStates::Extent most;
    for (int r = 0; r < plan.replicate_size; ++r) {
      const GroupMap::Begin& begin = window.map.begin(r);
      const GroupMap::Begin& end = window.map.begin(r + 1);
      most.elements = std::max<std::int64_t>(most.elements, end.position - begin.position);
      most.groups = std::max<std::int64_t>(most.groups, end.group - begin.group);
    }
    owned.push_back(most);
  }
  const bool feeds_back_gathered = formats.gathered.code != Code::kBf16;
  if (!feeds_back_gathered) owned.clear();
  scattered = std::make_unique<ErrorStates>(options.error_dtype, sent, plan.device);
  gathered = std::make_unique<ErrorStates>(options.error_dtype, owned, plan.device);
  held = MemoryCount(plan.memory)
             .hold(MemoryKind::kReplicaHop, 2 * (ErrorStates::bytes(options.error_dtype, sent) +
                                                 ErrorStates::bytes(options.error_dtype, owned)));
}

void LocoHop::prepare(const HopPlan& plan) {
  for (const std::string& pattern : parts_->options.exclude) {
    LocoOptions one;
    one.exclude = {pattern};
    if (std::ranges::none_of(plan.parameters, [&one](const HopParameter& parameter) {
          return is_excluded(one, parameter.name);
        })) {
      throw UsageError({.where = "loco: exclude",
                        .expected = "names or patterns of parameters",
                        .got = "'" + pattern + "', which matches none",
                        .remedy = "the first parameter is '" +
                                  (plan.parameters.empty() ? "" : plan.parameters.front().name) +
                                  "'"});
    }
  }
  const std::int64_t window_elements =
      plan.device.type == DeviceType::kHost ? kHostWindowElements : kCudaWindowElements;
  std::vector<Parts::BucketWindows> buckets;
  std::vector<LocoWindow> windows;
  for (const std::vector<ParameterRange>& ranges : plan.ranges) {
    Parts::BucketWindows bucket{.first = windows.size()};
    const auto whole =
        std::ranges::find_if(ranges, [](const auto& range) { return range.count > 0; });
    bucket.excluded =
        whole != ranges.end() &&
        bucket_class(plan.parameters[static_cast<std::size_t>(whole->parameter)]) != 0;
    if (!bucket.excluded) {
      for (std::vector<ParameterRange>& runs :
           cut_into_windows(ranges, parts_->options.group_size, window_elements)) {
        windows.emplace_back(std::move(runs), parts_->formats, plan.replicate_size, plan.device);
      }
    }
    bucket.end = windows.size();
    buckets.push_back(bucket);
  }
  if (parts_->scattered != nullptr && parts_->kept.empty()) {
    parts_->kept = KeptState(parts_->state(), false);
  }
  parts_->exchange =
      std::make_unique<LocoExchange>(std::move(windows), parts_->formats, plan.device, plan.memory);
  parts_->buckets = std::move(buckets);
  parts_->repeats.assign(parts_->buckets.size(), 0);
  parts_->reduction = plan.reduction;
  parts_->names.clear();
  for (const HopParameter& parameter : plan.parameters) parts_->names.push_back(parameter.name);
  parts_->device = plan.device;
  parts_->make_errors(plan);
  if (parts_->scatter) {
    parts_->exchange->bind(parts_->scatter, parts_->gather);
    parts_->put_back();
  }
}

void LocoHop::bind(Communicator scatter, Communicator gather) {
  Parts& parts = *parts_;
  parts.scatter = std::move(scatter);
  parts.gather = std::move(gather);
  if (parts.exchange == nullptr) return;  // prepare() failed
  parts.exchange->bind(parts.scatter, parts.gather);
  if (!parts.scatter) return;
  parts.replica = parts.scatter.rank();
  parts.put_back();
}

bool LocoHop::means(int bucket, float mean_divisor) const {
  if (parts_->is_plain(bucket)) return false;
  const float magnitude = std::abs(mean_divisor);
  if (magnitude >= 0x1p-100F && magnitude <= 0x1p100F) return true;
  throw UsageError({.where = "loco: divide factor times loss scale",
                    .expected = "a magnitude from 2^-100 to 2^100",
                    .got = std::to_string(mean_divisor),
                    .remedy = "choose another factor or scale"});
}

Event LocoHop::reduce(const HopBucket& bucket, Stream& stream) {
  Parts& parts = *parts_;
  const Event ready = stream.record();
  if (parts.is_plain(bucket.bucket)) {
    AllReduce args;
    args.data = bucket.data;
    args.wire = bucket.arithmetic.wire;
    args.send_exponent = bucket.arithmetic.send_exponent;
    args.total_exponent = bucket.arithmetic.total_exponent;
    args.divisor = bucket.arithmetic.divisor;
    args.nonfinite = bucket.nonfinite;
    args.bucket = bucket.bucket;
    args.reduction = parts.reduction;
    return parts.exchange->all_reduce(args, ready);
  }
  const auto number = static_cast<std::size_t>(bucket.bucket);
  const LocoExchange::Arguments arguments{.bucket = bucket,
                                          .beta = static_cast<float>(parts.options.err_beta),
                                          .dithers = parts.options.stochastic_error,
                                          .seed = parts.options.seed,
                                          .step = static_cast<std::uint32_t>(parts.steps),
                                          .repeat = parts.repeats[number]++};
  const bool cleared = parts.starts_afresh();
  for (std::size_t w = parts.buckets[number].first; w < parts.buckets[number].end; ++w) {
    LocoExchange::Errors errors;
    if (parts.scattered != nullptr) {
      errors.scattered = parts.scattered->next(w, cleared, parts.exchange->encode_stream());
    }
    if (parts.gathered != nullptr && parts.formats.gathered.code != Code::kBf16) {
      errors.gathered = parts.gathered->next(w, cleared, parts.exchange->sum_stream());
    }
    parts.exchange->reduce(w, arguments, errors, ready);
  }
  return parts.exchange->decoded();
}

void LocoHop::end_step(const StepEnd& end) {
  Parts& parts = *parts_;
  if (end.outcome == StepOutcome::kDropped) parts.exchange->finish();
  const bool clean = end.outcome == StepOutcome::kClean;
  for (ErrorStates* const errors : {parts.scattered.get(), parts.gathered.get()}) {
    if (errors == nullptr) continue;
    if (clean && parts.starts_afresh()) errors->clear_unwritten(parts.exchange->encode_stream());
    clean ? errors->commit() : errors->drop();
  }
  if (clean) ++parts.steps;
  std::ranges::fill(parts.repeats, 0U);
}

std::vector<ErrorPiece> LocoHop::Parts::pieces() const {
  std::vector<ErrorPiece> all;
  const auto add = [&](std::vector<ErrorPiece> pieces) {
    all.insert(all.end(), pieces.begin(), pieces.end());
  };
  if (scattered == nullptr) return all;
  const bool has_gathered = formats.gathered.code != Code::kBf16;
  for (std::size_t w = 0; w < exchange->windows().size(); ++w) {
    const GroupMap& map = exchange->windows()[w].map;
    add(pieces_of(map.tiles(), options.group_size, false, scattered->state(w)));
    if (!has_gathered) continue;
    add(pieces_of(map.tiles(replica), options.group_size, true, gathered->state(w)));
  }
  return all;
}

std::vector<HopState> LocoHop::Parts::state() {
  std::vector<HopState> all;
  all.push_back({-1, "steps", 0, {&steps, 1, Dtype::kI64, {}}});
  for (const ErrorPiece& piece : pieces()) append(piece, options.group_size, device, all);
  return all;
}

// Checks all of it before the first copy.
void LocoHop::Parts::put_back() {
  if (kept.empty()) return;
  const KeptState state = std::exchange(kept, {});
  const std::vector<ErrorPiece> from = pieces_from(state.state(), options.group_size);
  const std::vector<ErrorPiece> to = pieces();
  Stream stream = Stream::create(device, "hsdp-loco");
  for (const bool copies : {false, true}) {
    for (const ErrorPiece& target : to) {
      std::int64_t count = 0;
      for (const ErrorPiece& source : from) {
        count += common_elements(source, target, options.group_size);
        if (copies)
          stream.run([&] { copy(source, target, options.group_size, stream.inside_task()); });
      }
      if (!state.is_whole || count == target.count) continue;
      throw UsageError({.where = "loco: load_state",
                        .expected = "errors of all " + std::to_string(target.count) +
                                    " elements from " + std::to_string(target.flat_offset) +
                                    " of '" + names[static_cast<std::size_t>(target.parameter)] +
                                    "'" + (target.gathered ? ", gathered half" : ""),
                        .got = std::to_string(count),
                        .remedy = "load what the same rank of an equal mesh has saved"});
    }
  }
  stream.synchronize();
  for (const HopState& one : state.state()) {
    if (one.parameter < 0 && one.kind == "steps")
      steps = *static_cast<const std::int64_t*>(one.data.data);
  }
}

std::vector<HopState> LocoHop::state() {
  if (!parts_->exchange) return {};
  return parts_->state();
}

void LocoHop::load_state(std::span<const HopState> state) {
  static_cast<void>(pieces_from(state, parts_->options.group_size));
  if (std::ranges::none_of(state, [](const HopState& one) { return one.kind == "steps"; })) {
    throw UsageError({.where = "loco: load_state",
                      .expected = "a state that LocoHop has saved",
                      .got = "one without steps"});
  }
  parts_->kept = KeptState(state, true);
  if (parts_->scatter) parts_->put_back();
}

void LocoHop::scale_errors(float factor) {
  if (!std::isfinite(factor)) {
    throw UsageError({.where = "loco: scale_errors",
                      .expected = "a finite factor",
                      .got = std::to_string(factor)});
  }
  Parts& parts = *parts_;
  parts.scaled = parts.scaled * 31U + std::bit_cast<std::uint32_t>(factor);
  Stream stream = Stream::create(parts.device, "hsdp-loco");
  for (const ErrorPiece& piece : parts.pieces()) {
    kernels::ScaleAndCast args;
    args.multiplier = factor;
    args.count = piece.count;
    args.out = piece.errors.values;
    if (piece.errors.values == nullptr) {
      args.count = group_count(piece, parts.options.group_size);
      args.out = piece.errors.scales;
    }
    args.in = args.out;
    stream.run([args, inside = stream.inside_task()] { kernels::scale_and_cast(args, inside); });
  }
  stream.synchronize();
}

}  // namespace hsdp::quant
