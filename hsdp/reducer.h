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
// Ownership: the Reducer owns carry, staging and local sums. A gradient stays valid and unchanged
// until end_microbatch or abandon_step has returned or thrown, in a window with Accumulate::kGrad
// until the window has ended: declare it before the Microbatch guard, or pass `keep_alive`. Views
// of shard() are valid until the next step begins.
//
// Collective calls, which every rank of the mesh makes in the same order:
//
//   construction, prepare, begin_step, add_party, and registrations
//   microbatches, windows, finish, discard
//   gather_gradients, gather_parameters, grad_norm, clip_grad_norm, clip_factor, found_inf,
//     wait_table
//   save_snapshot, if results are sharded over the mesh
//
// All other calls are local: a rank may make them alone, except divide_by_tokens, which all ranks
// call or none. Flags, factors and the loss scale are set by local calls, to the same values on
// every rank.
//
// Threads and streams: gradient_ready and reject_gradient may be called from any thread, everything
// else from one thread at a time. Reductions run on threads of the Reducer. On CUDA a gradient is
// read after the work that set_stream()'s stream had when gradient_ready was called, results are
// ordered before its later work, and the stream that frees or overwrites a gradient waits for
// packed(). Only calls that return a number or a vector, save_snapshot, save_digest,
// release_memory, close and the destructor wait for the GPU; so does begin_microbatch if it has to
// change the memory of local sums.
//
// Errors: UsageError for misuse on this rank, and StepAbortedError where another rank dropped the
// step or failed to set the Reducer up: all ranks can go on. PeerLostError, TimeoutError, a
// MismatchError after the set-up, and a RankError with the text of what failed on another rank end
// the Reducer: every later call repeats the first of them, except stats, close and reading the last
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
#include "hsdp/memory_plan.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer_options.h"
#include "hsdp/reducer_stats.h"
#include "hsdp/step_party.h"
#include "hsdp/tensor_view.h"
#include "hsdp/wait_table.h"

namespace hsdp {

namespace reducer {

class Results;

// Tells whether a scope is left by an exception, and the reason that other ranks get if that drops
// a step.
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
  // Drops a step that has begun. Waits for its own work in flight, and for peers' status words up
  // to the mesh's timeout. Never throws.
  ~Reducer();
  // A Reducer that was moved from may only be destroyed or assigned to.
  Reducer(Reducer&&) noexcept;
  Reducer& operator=(Reducer&&) noexcept;

  // ---- Set-up

  // Before the first microbatch, in the same order on every rank. Returns the parameter's index.
  // UsageError for a name that is registered already, and for an impossible shape or dtype.
  int register_parameter(const ParameterSpec& spec);
  // CUDA: where the caller produces gradients and reads results, a framework's current stream.
  // Default: the device's legacy default stream. It may change from call to call; the last one
  // must live until the Reducer is gone.
  void set_stream(const Stream& stream);

  // Collective: lays out buckets, takes memory and starts threads. If it is not called, the first
  // begin_microbatch does this. It succeeds on all ranks or on none, and may be tried again.
  // UsageError if no parameter is registered, MismatchError if the ranks' parameters differ,
  // StepAbortedError if another rank failed, for lack of memory say.
  void prepare();

  // ---- Which hops run, and what the sum is divided by

  // For microbatches without `sync`. Without gradient sync they are kNone; without all-reduce, and
  // without `last`, kShard. Both are on at first. As in FSDP2 the first also sets the second. For
  // all groups or for one, outside a microbatch.
  void set_requires_gradient_sync(bool flag, const std::optional<std::string>& group = {});
  void set_requires_all_reduce(bool flag, const std::optional<std::string>& group = {});
  // What last = false means: kShard; or kNone, for stage 1 of ZeRO, which keeps whole local sums
  // until the end of the step. Outside a microbatch, the same on every rank.
  void set_partial_sync(Sync sync);
  // Until it is set again; std::nullopt restores the default. Outside a microbatch, before the
  // step's last one.
  void set_gradient_divide_factor(std::optional<double> factor);
  void set_loss_scale(double scale);  // between steps
  // For losses that are sums over tokens: call it before each microbatch of the step with the
  // number of tokens on this rank. The divide factor is their sum over microbatches and ranks. If
  // the sum is zero, so is the gradient. Not together with set_gradient_divide_factor.
  void divide_by_tokens(std::int64_t count);

  // ---- Microbatches

  // Begins a step before its first microbatch would: the last result becomes invalid, and from here
  // on abandon_step drops the new step. Does nothing if the step has begun already. UsageError
  // while microbatches are pending.
  void begin_step();
  // Before the gradients of a microbatch. A step's first call begins the step, unless begin_step()
  // has, and waits for the status words about the step before; later calls do not wait. UsageError
  // while a microbatch is open, for options that contradict each other or the flags, and if options
  // without `last` and `sync` would begin a step although nobody has read the last result.
  void begin_microbatch(const MicrobatchOptions& options = {});
  // Packs at once if there is room, and otherwise keeps the view (and `keep_alive`) and packs
  // later. Never waits for a peer or for staging.
  void gradient_ready(std::string_view name, const StridedView& gradient,
                      std::shared_ptr<const void> keep_alive = {}, const ValidAfter& valid = {});
  void gradient_ready(int parameter, StridedView gradient,
                      std::shared_ptr<const void> keep_alive = {}, const ValidAfter& valid = {},
                      KeptUntil kept_until = KeptUntil::kRead);
  // An Event that completes when all gradients handed over so far have been read.
  [[nodiscard]] Event packed();
  // Reports a gradient that could not be viewed as an array; end_microbatch() then throws a
  // UsageError with this message and drops the step. Does nothing if no microbatch is open.
  void reject_gradient(std::string_view message);
  // Returns when all gradients are packed and may be overwritten (CUDA: after packed()). Readers of
  // results wait until they are reduced. UsageError for a missing gradient, or one that
  // gradient_ready refused; the step is dropped then. StepAbortedError if this rank knows by now
  // that another one has dropped the step.
  void end_microbatch();

  // ---- Windows of several backward passes

  // A window is one microbatch of the step, with any number of backward passes that are reduced
  // once. Ranks may run different numbers of passes at different times. Inside, begin_microbatch
  // and end_microbatch only delimit passes, and flags that are set are undone at the window's end.
  // zero::CoalescedWindow holds one over several Reducers.
  void begin_window(const WindowOptions& options = {});
  // `backwards`: of how many passes each gradient is the sum; more than one with Accumulate::kGrad
  // only.
  void end_window(std::int64_t backwards = 1);

  // ---- The end of a step

  // Drops the step on all ranks, in a microbatch or between two. This rank is idle at once, and
  // sends zeros for what its peers wait for. Each peer gets one StepAbortedError with the reason
  // (up to 1 KiB) from its first call that knows of the drop. Its end_microbatch may return before
  // that; it waits to know in everything that reads a result or partial, gather_*, finish,
  // save_snapshot, the next end_microbatch that sends something, and the begin of a new step. So
  // one try block has to hold the microbatches, the update and the gather. May wait for the
  // previous microbatch's status words, never longer. The next step's begin waits for the peers'
  // next status words, however long those take. Peers' collectives between microbatches
  // (gather_parameters) have no status word: they wait for this rank until the timeout. Does
  // nothing if no step has begun, or another rank has dropped it already.
  void abandon_step(std::string_view reason) noexcept;

  // Completes a pending carry without new gradients. If none is pending it only waits until all
  // ranks agree on the step, so it may be called twice.
  void finish();
  void discard();  // drops the pending carry or the last result, if there is one
  // As the destructor, and waits for snapshots. Every later call except stats() is a UsageError,
  // and another Reducer may use the replica hop.
  void close();

  // Between steps: frees local sums and mid-step totals, which are kept for later steps. Waits
  // until the ranks agree on the last step; not collective.
  void release_memory();

  // ---- Results

  [[nodiscard]] TensorView shard(std::string_view name);  // fp32 or f64, writable, its slice
  // With missing = zero: the parameters for which no rank had a gradient in the finished step. An
  // optimizer leaves them as they are. `call` is the caller's name in errors.
  [[nodiscard]] std::vector<int> unused_parameters(std::string_view call = "unused_parameters");
  // carry / (f s), a copy. Not while a group holds totals of an earlier all-reduce of the step.
  [[nodiscard]] std::vector<float> partial_shard(std::string_view name);
  void partial_shard(std::string_view name, TensorView out);  // of the slice's count, as local_sum
  // This rank's undivided sum of a parameter's gradients, in a window or in microbatches with
  // sync = none. A copy of the whole parameter; the form with a vector takes no f64. Not while
  // another thread hands over gradients of that parameter.
  [[nodiscard]] std::vector<float> local_sum(std::string_view name);
  // f32 of the parameter's count, or f64 where its gradients are.
  void local_sum(std::string_view name, TensorView out);
  [[nodiscard]] Slice slice(std::string_view name);
  // Where everything lies; valid as long as the Reducer. Before prepare() it is the layout of what
  // is registered so far, and changes with the next registration.
  [[nodiscard]] const BucketLayout& layout();
  [[nodiscard]] const std::vector<ParameterSpec>& parameters() const;

  // Fill whole arrays of parameters from all ranks' slices, and return when that is done: of all
  // parameters or some, each once, the same ones on every rank. UsageError for an unknown name, one
  // that comes twice, and an array of another count, dtype or device. On a GPU arrays are written
  // in the order of the caller's stream. If such a call throws what ended the world, they may still
  // be written to until close() has returned. The full mean: f32, bf16, f16, or f64 where the
  // gradients are.
  void gather_gradients(std::span<const NamedArray> arrays);
  void gather_parameters(std::span<const NamedArray> arrays);  // own slice updated; any dtype

  // ---- Norms, and values that are not finite

  // With an output, a call on the host waits for no peer: the output is written when the Event is
  // complete, and must stay valid until then. wait() throws StepAbortedError if another rank drops
  // the step, and the failure of the world; the next call throws both, too. On a GPU the call
  // itself waits until the ranks agree, and throws; it does not wait for the GPU.
  [[nodiscard]] double grad_norm();        // L2 norm of the whole mean gradient
  Event grad_norm(TensorView out);         // the same in one f64
  double clip_grad_norm(double max_norm);  // scales the shards when above; returns the norm
  [[nodiscard]] bool found_inf();          // any rank, any microbatch of the finished step
  Event found_inf(TensorView out);         // the same as 1 or 0 in one f32

  // ---- Files

  // Writes this rank's file in the background. flush_snapshots waits for it and throws its error,
  // as do the next save_snapshot and close. Collective if results are sharded over the mesh, as the
  // replicas' parts are gathered first.
  void save_snapshot(const std::filesystem::path& path, std::int64_t step);
  void flush_snapshots();
  // Appends digests of this rank's slices of the result to its file in that folder, 17 bytes a
  // parameter. hsdp_check --digest compares two runs by them, step by step. Local.
  void save_digest(const std::filesystem::path& folder, std::int64_t step);

  // ---- State

  // From the next step on, compares the words of `party` over the ranks and tells it how steps end.
  // Between steps, in the same order on every rank. The Reducer forgets it when it is destroyed.
  void add_party(std::weak_ptr<StepParty> party);

  [[nodiscard]] ReducerStats stats() const;
  // What this rank will hold and send, to the byte as stats() counts it once steps have run. At any
  // time after the parameters are registered. Local. Leaves out what depends on the run: retained
  // gradients, and copies for snapshots. UsageError if no parameter is registered, and for options
  // that prepare() would refuse.
  [[nodiscard]] MemoryPlan memory_plan(const MemoryUse& use = {});
  // Who waited for whom in this Reducer's operations among each rank's last 1,000. Collective,
  // outside a microbatch; it measures the ranks' clocks first. Not for each step.
  [[nodiscard]] WaitTable wait_table();
  [[nodiscard]] ReducerState state() const;  // never waits, in any phase
  [[nodiscard]] Device device() const;       // of the mesh
  [[nodiscard]] int shard_rank() const;      // of this process in its shard group

 private:
  friend class ReducerInternal;
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
// Writes the scaling factor without scaling: min(1, max_norm / (norm + 1e-6)), in one f32 or f64.
// For an optimizer that multiplies gradients as it reads them, as zero::AdamW does.
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
