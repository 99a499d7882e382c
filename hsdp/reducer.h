// Reduces gradients over a mesh: reduce-scatter in the shard group each microbatch, fp32 carry,
// replica hop on the last. The state machine of [Note: states of a Reducer].
//
//   Reducer reducer(mesh, {.reduce_dtype = Dtype::kBf16});
//   reducer.register_parameter({.name = "w", .shape = {128, 64}});
//   for (int m = 0; m < 4; ++m) {
//     reducer.begin_microbatch({.last = m == 3});
//     reducer.gradient_ready("w", gradient);           // from any thread, in any order
//     reducer.end_microbatch();
//   }
//   TensorView mean = reducer.shard("w");               // this rank's slice, fp32
//
// Ownership: the Reducer owns carry, staging and accumulators. A gradient handed to gradient_ready
// must stay valid and unchanged until end_microbatch (or abandon_step) returns or throws:
// declare it before the Microbatch guard, or pass `keep_alive`. In a window with Accumulate::kGrad
// that is the window's end. `shard()` views live until the next
// step begins.
// Streams: on CUDA nothing waits for the GPU but what returns a number or a vector, saving a
// snapshot and close; found_inf, the norms and partial_shard also write to memory of the device.
// Gradients are read after the work that set_stream()'s stream had when gradient_ready was called;
// results are ordered before the work it gets next. The stream that frees or overwrites a gradient
// waits for packed().
// Threads: gradient_ready may be called from any thread during a microbatch; everything else from
// one thread at a time. Reductions run on streams of the Reducer's own.
// Collective: construction, the first begin_microbatch, microbatches, windows, finish, discard,
// grad_norm, clip_grad_norm, clip_factor, found_inf to memory, gather_*, make_lane and close are
// called by every rank of the mesh in the same order.
// Errors: UsageError for misuse on this rank; StepAbortedError when another rank dropped the step
// or failed to set the Reducer up (all stay usable). PeerLostError, TimeoutError, a MismatchError
// but that of a set-up, and a RankError with the text of what failed on another rank end the
// Reducer: every later call repeats the first of these, but for stats, close and reading the last
// finished result.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/device/stream.h"
#include "hsdp/error.h"
#include "hsdp/gather_lane.h"
#include "hsdp/memory_count.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer_options.h"
#include "hsdp/reducer_stats.h"
#include "hsdp/step_party.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

class Operations;

namespace reducer {

class Results;

// How a scope that began with it ends, and what its rank tells the others when that drops a step.
class ScopeEnd {
 public:
  static constexpr std::string_view kRaised = "its block raised an exception";

  [[nodiscard]] bool raised() const { return std::uncaught_exceptions() > exceptions_; }
  [[nodiscard]] std::string_view reason(std::string_view without_exception) const {
    return raised() ? kRaised : without_exception;
  }

 private:
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace reducer

// A full array of one parameter, contiguous, for gather_gradients and gather_parameters.
struct NamedArray {
  std::string name{};
  TensorView array{};
};

class Reducer {
 public:
  explicit Reducer(const Mesh& mesh, ReducerOptions options = {});
  // Drops a step that is begun, and waits for own work in flight, for its peers' words at most as
  // long as the mesh's timeout. Never throws.
  ~Reducer();
  // One that was moved from may only be destroyed or assigned to.
  Reducer(Reducer&&) noexcept;
  Reducer& operator=(Reducer&&) noexcept;

  // Before the first microbatch, same order on every rank. Returns the parameter's index.
  // UsageError for a name that is registered already, and a shape or dtype that cannot be.
  int register_parameter(const ParameterSpec& spec);
  // The same for all that are registered: their units, in their order.
  void set_units(std::span<const int> units);

  // As the option shard_over. Before the first microbatch, the same on every rank.
  void set_shard_over(ShardOver over);

  // For microbatches without `sync`: gradient sync off makes it kNone; all-reduce off, where there
  // is no `last` either, kShard. Both are on at first, and as in FSDP2 the first sets the second,
  // too. Of all groups or of one, outside a microbatch.
  void set_requires_gradient_sync(bool flag, const std::optional<std::string>& group = {});
  void set_requires_all_reduce(bool flag, const std::optional<std::string>& group = {});
  // What last = false means: kShard, or kNone, as stage 1 of ZeRO keeps gradients whole and local
  // until the step's end. Outside a microbatch, the same on every rank.
  void set_partial_sync(Sync sync);
  // std::nullopt restores the default. Outside a microbatch, until the step's last one begins;
  // persists.
  void set_gradient_divide_factor(std::optional<double> factor);
  void set_loss_scale(double scale);  // between steps
  // For losses that are sums over tokens: before each microbatch of the step, how many it has on
  // this rank. The numbers add up over microbatches and ranks, and are the divide factor. Where
  // none were counted the gradient is zero. Not with a factor that was set.
  void divide_by_tokens(std::int64_t count);

  // CUDA: where the caller produces gradients and reads results, a framework's current stream.
  // Default: the device's legacy default stream. It may change from call to call; the last one
  // must live until the Reducer is gone.
  void set_stream(const Stream& stream);

  // Collective: lays out buckets, takes memory and starts threads, which else the first begin does.
  // All ranks have it in the end or none, and it may be tried again. UsageError where no parameter
  // is registered; MismatchError where the ranks' differ; StepAbortedError where another rank could
  // not, as for want of memory.
  void prepare();
  // Collective: runs a part of a set-up that rests on this Reducer. Where it throws on one rank,
  // the others get a StepAbortedError, "rank 1 could not <what>: ...".
  void together(std::string_view what, const std::function<void()>& part);

  // Begins a step before its first microbatch, which otherwise does so: the last result is over,
  // and from here on abandon_step drops the step. Nothing when it is begun already; UsageError
  // while microbatches are pending.
  void begin_step();
  // Before the gradients of a microbatch. The first one of a step begins the step, unless
  // begin_step() has, and waits for the ranks' words about the last one; others do not wait.
  // UsageError while one is open, for options that contradict each other or the flags, and where
  // options that say nothing would begin a step over a result that nobody has read.
  void begin_microbatch(const MicrobatchOptions& options = {});
  // Packs at once when there is room, else keeps the view (and `keep_alive`) and packs later.
  // Never waits for a peer or for staging.
  void gradient_ready(std::string_view name, const StridedView& gradient,
                      std::shared_ptr<const void> keep_alive = {}, const ValidAfter& valid = {});
  void gradient_ready(int parameter, StridedView gradient,
                      std::shared_ptr<const void> keep_alive = {}, const ValidAfter& valid = {},
                      KeptUntil kept_until = KeptUntil::kRead);
  // Completes when all gradients handed over so far have been read.
  [[nodiscard]] Event packed();
  // A gradient came that could not even be made a view of: end_microbatch raises UsageError with
  // this message and drops the step. From any thread; no-op when no microbatch is open.
  void reject_gradient(std::string_view message);
  // Returns when all gradients are packed, so that they may be overwritten (CUDA: after packed()),
  // not when they are reduced: shard() and the like wait for that. UsageError for a missing
  // gradient and what gradient_ready refused: the step is dropped then. StepAbortedError where
  // another rank has dropped it, as far as is known here by now.
  void end_microbatch();
  // Whether a gradient of that parameter (an index from register_parameter) was handed over in the
  // step that is begun and not ended. UsageError for an index that was not returned.
  [[nodiscard]] bool has_gradient(int parameter) const;
  // A window of several backward passes, however many, that are reduced once: one microbatch of the
  // step. The ranks need not keep step inside of it, and may run different numbers of passes. Calls
  // of begin_microbatch and end_microbatch inside are allowed and do nothing else; flags that are
  // set inside are undone at its end. zero::CoalescedWindow holds one over several Reducers.
  void begin_window(const WindowOptions& options = {});
  // Throws what end_window would throw for this rank's own mistakes: to be asked of several
  // Reducers before the first one's window ends.
  void check_window();
  // `backwards`: how many passes each gradient that was handed over is the sum of; more than one
  // with Accumulate::kGrad only.
  void end_window(std::int64_t backwards = 1);
  // Leaves a window without its end: drops its step, unless that was dropped inside of it. From
  // such a drop on every call is refused until the window is left, by this or by end_window, which
  // throws.
  void leave_window(std::string_view reason) noexcept;
  // Waits until all ranks agree on what this one has done, and takes the StepAbortedError that the
  // next call would throw; none when no other rank has dropped the step.
  [[nodiscard]] std::optional<StepAbortedError> take_drop();
  // What this rank has added up of a parameter's gradients, in a window or in microbatches with
  // sync = none: not divided by anything. A copy of the whole parameter; the vector's form takes no
  // f64. Not while another thread hands over gradients of it.
  [[nodiscard]] std::vector<float> local_sum(std::string_view name);
  // f32 of the parameter's count, or f64 where its gradients are.
  void local_sum(std::string_view name, TensorView out);
  // Drops the step on all ranks, in a microbatch or between two: this rank is idle at once and
  // sends zeros for what its peers wait for. They get a StepAbortedError with the reason (1 KiB of
  // it), once, from the first call that knows of the drop. Their end_microbatch may return before;
  // what reads a result or a partial, gather_*, finish, save_snapshot, another end_microbatch that
  // sends something and the begin of a new step wait until they know. So one try block has to hold
  // the microbatches, the update and the gather.
  // Waits for the previous microbatch's status words at most; the next step's begin waits for the
  // peers' next ones, however long those take. Collectives of theirs between microbatches
  // (gather_parameters) have no word: they wait for this rank until the timeout. No-op where no
  // step is begun, or another rank has dropped it already.
  void abandon_step(std::string_view reason) noexcept;

  // Completes a pending carry without fresh gradients; with none pending it only waits until all
  // ranks agree on the step. Safe to call twice.
  void finish();
  void discard();  // drops it, or the last result; no-op where there is neither
  // As the destructor, and waits for snapshots; then every call but stats() is a UsageError, and
  // the replica hop is free for another owner.
  void close();

  // Between steps: gives back what is kept for the next ones, local sums and mid-step totals. Waits
  // for the ranks to agree on the last step; not collective.
  void release_memory();

  [[nodiscard]] TensorView shard(std::string_view name);  // fp32 or f64, writable, its slice
  // With missing = zero: the parameters of which no rank had a gradient in the finished step. An
  // optimizer leaves them as they are, as it would without the gradient. `call` is whose it is, in
  // errors.
  [[nodiscard]] std::vector<int> unused_parameters(std::string_view call = "unused_parameters");
  // carry / (f s), a copy. Not while a group that was all earlier in the step holds totals.
  [[nodiscard]] std::vector<float> partial_shard(std::string_view name);
  void partial_shard(std::string_view name, TensorView out);  // of the slice's count, as local_sum
  [[nodiscard]] Slice slice(std::string_view name);
  // All of this shard rank's: with the parts of the other replicas.
  [[nodiscard]] Slice shard_slice(std::string_view name);
  // Where everything lies; lives as long as the Reducer. Before prepare() it is that of what is
  // registered so far, until more is.
  [[nodiscard]] const BucketLayout& layout();
  [[nodiscard]] const std::vector<ParameterSpec>& parameters() const;

  // Fill arrays of parameters from all ranks' slices: of all, or of some, each once, the same ones
  // on every rank. They return when that is done. UsageError for an unknown name, one that comes
  // twice, and an array of another count, dtype or device. On a GPU arrays are written in the order
  // of the caller's stream; where such a call throws what ended the world they may still be written
  // to until close() has returned.
  // The full mean: f32, bf16, f16, or f64 where the gradients are.
  void gather_gradients(std::span<const NamedArray> arrays);
  void gather_parameters(std::span<const NamedArray> arrays);  // own slice updated; any dtype

  // The forms with an output wait for no peer on the host: the output is there when the Event is
  // complete, and until then it must stay valid. wait() throws StepAbortedError where another rank
  // drops the step, and the failure of the world; both are raised by the next call, too. On a GPU
  // the call itself waits for the ranks to agree and throws, and nothing waits for the GPU.
  [[nodiscard]] double grad_norm();        // L2 norm of the whole mean gradient
  Event grad_norm(TensorView out);         // the same in one f64
  double clip_grad_norm(double max_norm);  // scales the shards when above; returns the norm
  [[nodiscard]] bool found_inf();          // any rank, any microbatch of the finished step
  Event found_inf(TensorView out);         // the same as 1 or 0 in one f32

  // Writes this rank's file in the background; `flush_snapshots` waits and throws its error, as do
  // the next save_snapshot and close.
  // Collective where results are sharded over the mesh: gathers the replicas' parts first.
  void save_snapshot(const std::filesystem::path& path, std::int64_t step);
  void flush_snapshots();
  // Appends digests of this rank's slices of the result to its file in that folder: some bytes a
  // parameter, by which hsdp_check --digest compares two runs step by step. Local; on a GPU it
  // waits for the result.
  void save_digest(const std::filesystem::path& folder, std::int64_t step);

  // Tells `party` how steps end, and compares its words, from the next step on. Between steps, in
  // the same order on every rank; it is forgotten when it dies.
  void add_party(std::weak_ptr<StepParty> party);

  // Collective, between microbatches: a lane for collectives of the shard group that run under
  // later microbatches. `name` is that of its thread, the same on every rank. `prepare` is run
  // first: what it throws is agreed like the rest, and the lines it returns are compared between
  // the ranks. All ranks have the lane in the end or none, and it may be tried again.
  using LanePreparation = std::function<std::vector<std::string>()>;
  [[nodiscard]] std::unique_ptr<GatherLane> make_lane(const std::string& name,
                                                      const LanePreparation& prepare = {});

  [[nodiscard]] ReducerStats stats() const;
  // For the memory of what works on the Reducer's slices; stats() reports it.
  [[nodiscard]] MemoryCount memory_count() const;
  // For the record of what works on them, and its times in stats().
  [[nodiscard]] const Operations& operations() const;
  [[nodiscard]] ReducerState state() const;  // never waits, in any phase
  [[nodiscard]] Device device() const;       // of the mesh
  [[nodiscard]] int shard_rank() const;      // of this process in its shard group
  // Into how many parts a shard rank's slices are cut: the replicas where results are sharded over
  // the mesh, else 1. layout() has the parts: those of a shard rank beside each other.
  [[nodiscard]] int slice_parts() const;
  [[nodiscard]] std::int64_t verify_every() const;  // of its options

 private:
  friend double clip_grad_norm(std::span<Reducer* const> reducers, double max_norm);
  friend Event clip_grad_norm(std::span<Reducer* const> reducers, double max_norm, TensorView norm);
  friend Event clip_factor(std::span<Reducer* const> reducers, double max_norm, TensorView norm,
                           TensorView factor);
  [[nodiscard]] static std::vector<reducer::Results*> results_to_clip(
      std::span<Reducer* const> reducers, double max_norm, std::string_view call);
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// One norm over the gradients of several Reducers of one mesh. Where the step of one of them is
// dropped, none is scaled.
double clip_grad_norm(std::span<Reducer* const> reducers, double max_norm);
// The same with the norm in one f64, as Reducer::grad_norm(out). On CUDA on the stream of the first
// Reducer, which becomes that of all.
Event clip_grad_norm(std::span<Reducer* const> reducers, double max_norm, TensorView norm);
// As before, but it scales nothing: it writes what to scale by, which is 1, or max_norm / (norm +
// 1e-6) where that is less, in one f32 or f64. For an optimizer that multiplies gradients as it
// reads them, as zero::AdamW does.
Event clip_factor(std::span<Reducer* const> reducers, double max_norm, TensorView norm,
                  TensorView factor);

// Begins a step, and drops it on all ranks when an exception leaves the scope.
//   { Step step(reducer); for (...) { Microbatch ... } }
class Step {
 public:
  explicit Step(Reducer& reducer);
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

 private:
  Reducer& reducer_;
  reducer::ScopeEnd scope_;
};

// A microbatch, which end() ends. A scope that is left without end(), by an exception or without
// one, drops the step on all ranks.
//   { Microbatch microbatch(reducer, {.last = true}); backward(); microbatch.end(); }
class Microbatch {
 public:
  explicit Microbatch(Reducer& reducer, const MicrobatchOptions& options = {});
  ~Microbatch();
  Microbatch(const Microbatch&) = delete;
  Microbatch& operator=(const Microbatch&) = delete;
  void end();

 private:
  Reducer* reducer_;
  reducer::ScopeEnd scope_;
};

}  // namespace hsdp
