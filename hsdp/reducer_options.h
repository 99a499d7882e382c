// What a Reducer is told: options at construction, parameters, and what a microbatch does.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "hsdp/bucket_layout.h"
#include "hsdp/device/event.h"
#include "hsdp/device/stream.h"
#include "hsdp/dtype.h"
#include "hsdp/replica_hop.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

// Messages say missing="zero", as Python does, for .missing = Missing::kZero.

// What happens to a microbatch's gradients.
enum class Sync : std::uint8_t {
  kNone,   // added up on this rank, at full size; nothing is sent
  kShard,  // reduced in the shard group, added to the carry
  kAll,    // as kShard, then reduced over the replicas; ends the step if every group has it
};
// A parameter without a gradient at the end of a microbatch.
enum class Missing : std::uint8_t {
  kError,  // a UsageError, and the step is dropped
  kZero,   // counts as zeros
};
// How many gradients a parameter gets in a microbatch.
enum class Backwards : std::uint8_t {
  kOne,   // a second one is a UsageError
  kMany,  // they are added up on this rank, and reduced at the end
};
// Of local sums.
enum class AccumulateDtype : std::uint8_t {
  kF32,
  kParam,  // the parameter's gradient dtype: less memory, rounded at each addition
};
// Who adds up the gradients of a window.
enum class Accumulate : std::uint8_t {
  kBuffer,  // the Reducer
  kGrad,    // the caller, who hands each parameter's sum over
};
// Where local sums are.
enum class AccumulateOn : std::uint8_t {
  kDevice,  // in memory of the mesh's device
  kHost,    // in pinned memory of the host, beside a GPU
};
// Over which ranks a step's result is cut into slices, and with it the state of an optimizer.
enum class ShardOver : std::uint8_t {
  kShard,  // the shard group: every replica has the same slices
  kMesh,   // the whole mesh: a replica has its part of each slice of kShard
};
// What the default divide factor counts.
enum class DivideBy : std::uint8_t {
  kRanks,              // the sum over microbatches of the mean over ranks
  kRanksMicrobatches,  // the mean over both
};

// A value of an option and its word, for Python, messages and snapshots.
template <typename Value>
struct Choice {
  std::string_view word;
  Value value;
};
// All values of an option's type.
constexpr std::array<Choice<Sync>, 3> choices(Sync /*of*/) {
  return {{{"none", Sync::kNone}, {"shard", Sync::kShard}, {"all", Sync::kAll}}};
}
constexpr std::array<Choice<Layout>, 3> choices(Layout /*of*/) {
  return {{{"flat", Layout::kFlat}, {"dim0", Layout::kDim0}, {"whole", Layout::kWhole}}};
}
constexpr std::array<Choice<Missing>, 2> choices(Missing /*of*/) {
  return {{{"error", Missing::kError}, {"zero", Missing::kZero}}};
}
constexpr std::array<Choice<Backwards>, 2> choices(Backwards /*of*/) {
  return {{{"one", Backwards::kOne}, {"many", Backwards::kMany}}};
}
constexpr std::array<Choice<AccumulateDtype>, 2> choices(AccumulateDtype /*of*/) {
  return {{{"f32", AccumulateDtype::kF32}, {"param", AccumulateDtype::kParam}}};
}
constexpr std::array<Choice<Accumulate>, 2> choices(Accumulate /*of*/) {
  return {{{"buffer", Accumulate::kBuffer}, {"grad", Accumulate::kGrad}}};
}
constexpr std::array<Choice<AccumulateOn>, 2> choices(AccumulateOn /*of*/) {
  return {{{"device", AccumulateOn::kDevice}, {"host", AccumulateOn::kHost}}};
}
constexpr std::array<Choice<ShardOver>, 2> choices(ShardOver /*of*/) {
  return {{{"shard", ShardOver::kShard}, {"mesh", ShardOver::kMesh}}};
}
constexpr std::array<Choice<DivideBy>, 2> choices(DivideBy /*of*/) {
  return {{{"ranks", DivideBy::kRanks}, {"ranks*microbatches", DivideBy::kRanksMicrobatches}}};
}
template <typename Value>
constexpr std::string_view word_of(Value value) {
  for (const auto& choice : choices(value)) {
    if (choice.value == value) return choice.word;
  }
  return "";
}

// [Note: buckets that a cache holds]
constexpr std::int64_t kHostBucketBytes = std::int64_t{2} << 20;

// The default for a mesh of that many ranks. On a GPU each rank's part of a bucket has 64 KiB, with
// buckets of at least 32 and at most 128 MiB.
constexpr std::int64_t default_bucket_bytes(DeviceType device, int rank_count) {
  if (device == DeviceType::kHost) return kHostBucketBytes;
  constexpr std::int64_t kMessage = std::int64_t{64} << 10;
  return std::clamp(kMessage * rank_count, std::int64_t{32} << 20, std::int64_t{128} << 20);
}

struct ReducerOptions {
  // Wire dtype of the shard hop; f64 gradients are always sent as f64. Default: the gradient's
  // dtype.
  std::optional<Dtype> reduce_dtype{};
  std::optional<Dtype> replica_dtype{};  // wire of the replica hop; default: the reduce dtype
  Layout layout = Layout::kFlat;
  std::optional<std::int64_t> bucket_bytes{};  // wire bytes of a whole bucket; default: as above
  Missing missing = Missing::kError;
  Backwards backwards = Backwards::kOne;
  AccumulateDtype accumulate_dtype = AccumulateDtype::kF32;  // of local sums
  AccumulateOn accumulate_on = AccumulateOn::kDevice;
  std::string reduction = "exact";            // or "native" (nccl only)
  std::shared_ptr<ReplicaHop> replica_hop{};  // default: a PlainHop
  DivideBy divide_by = DivideBy::kRanks;      // the default divide factor
  // kMesh: the replica hop is a reduce-scatter, so it must have scatters(); no rank holds a whole
  // shard of the result. With one replica both are the same.
  ShardOver shard_over = ShardOver::kShard;
  // Compare every N steps; 0: never. The replicas compare the bits of the step's result (not with
  // kMesh, where each has another part). After every Nth gather of a zero::ParameterGather, all
  // ranks compare the parameters in the next step's status words; before every Nth update of a
  // zero::UnitGather, what they have gathered since the last one. A difference ends the world with
  // a MismatchError; one of results, before they can be read.
  std::int64_t verify_every = 0;
  std::string name{};  // in snapshots, and where ranks compare options; one line, at most 127 bytes
};

// Calls visit(name, value) for every option, in their order.
template <typename Options, typename Visit>
void visit_fields(Options& options, Visit visit) requires
    std::is_same_v<std::remove_const_t<Options>, ReducerOptions> {
  visit("name", options.name);
  visit("reduce_dtype", options.reduce_dtype);
  visit("replica_dtype", options.replica_dtype);
  visit("layout", options.layout);
  visit("bucket_bytes", options.bucket_bytes);
  visit("missing", options.missing);
  visit("backwards", options.backwards);
  visit("accumulate_dtype", options.accumulate_dtype);
  visit("accumulate_on", options.accumulate_on);
  visit("reduction", options.reduction);
  visit("replica_hop", options.replica_hop);
  visit("divide_by", options.divide_by);
  visit("shard_over", options.shard_over);
  visit("verify_every", options.verify_every);
}

struct ParameterSpec {
  std::string name{};
  Shape shape{};
  Dtype dtype = Dtype::kF32;  // of its gradients: f32, bf16, f16 or f64, which is reduced in f64
  std::optional<Dtype> reduce_dtype{};
  std::string group{};  // parameters whose sync flags are set together; a group has its own buckets
  // Parameters of different units that follow each other share no bucket, so that a unit's slices
  // are spread over all ranks: for zero::UnitGather. Not in layout whole.
  int unit = 0;
  // The last dimension, of 2, has the real and imaginary part of complex numbers: every slice has
  // whole ones.
  bool is_complex = false;
};

// Which sync a microbatch runs: an explicit `sync` decides; else a group whose gradient sync is off
// is none; else last = true means all and last = false the partial sync
// (Reducer::set_partial_sync); else the all-reduce flag decides.
struct MicrobatchOptions {
  std::optional<bool> last{};
  std::optional<Sync> sync{};
  // Whether this rank has a batch. Set it on all ranks or on none, if ranks can run out of batches.
  // A rank without one hands over no gradients; f counts the batches that exist.
  std::optional<bool> has_batch{};
};

// A window of backward passes that are reduced once.
struct WindowOptions {
  // True ends the step, false leaves it pending with the partial sync. None: the flags decide, all
  // of which are on by default: it ends the step.
  std::optional<bool> last{};
  // Gradients per parameter, if this rank knows: the parameter can be reduced after the last one,
  // and one more is a UsageError.
  std::optional<std::int64_t> backwards{};
  // kBuffer: the Reducer adds them up. kGrad: the caller does, and hands each parameter's sum over.
  Accumulate accumulate = Accumulate::kBuffer;
  AccumulateDtype accumulate_dtype = AccumulateDtype::kF32;  // of the Reducer's local sums
  std::optional<bool> has_batch{};                           // as of a microbatch
};

// When a gradient is valid: after an event, else after the work that a stream has when the gradient
// is packed. Without both: as with the stream of set_stream().
struct ValidAfter {
  ValidAfter() = default;
  ValidAfter(Event its) : event(std::move(its)) {}    // NOLINT(*-explicit-*)
  ValidAfter(Stream its) : stream(std::move(its)) {}  // NOLINT(*-explicit-*)

  std::optional<Event> event{};
  std::optional<Stream> stream{};
};

// How long `keep_alive` of a gradient on a GPU is kept: until the GPU has read it; or, for memory
// that is freed in the order of the stream in `valid`, at most until that stream waits for the GPU
// to have read it. That stream must live, and not be captured, until the microbatch has ended.
enum class KeptUntil : std::uint8_t { kRead, kOrdered };

}  // namespace hsdp
