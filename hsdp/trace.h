// A trace of a block of code: what the Reducers and lanes of all ranks did in it, on one clock, in
// one file that Perfetto and chrome://tracing open.
//
//   hsdp::Trace trace(reducer, "trace.json");
//   for (...) step();
//   trace.write();
//
// Ownership: the Reducer outlives the Trace. A world has one at a time. It keeps the first 65,536
// operations of each rank, about 10 MB; the file says how many came after them.
// Threads: one at a time, that of the Reducer's calls. Every rank of the Reducer's mesh makes the
// Trace and writes it, in the same order among its collective calls and outside of microbatches.
// Errors: what goes wrong on one rank is an error on all, and leaves no file; a lost rank is a
// PeerLostError. A Trace that is destroyed without write() logs a warning, tells the other ranks
// and waits for none: their write() throws a StepAbortedError, and nothing is written. Their steps
// wait for this rank as they do without a Trace.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "hsdp/reducer.h"

namespace hsdp {

struct TraceSettings;

class Trace {
 public:
  // Collective. Begins. The first rank of the mesh writes the file; the other ranks' paths are not
  // used. Throws UsageError if a trace runs or a microbatch is open, and Error if the file cannot
  // be made.
  [[nodiscard]] Trace(Reducer& reducer, const std::filesystem::path& path);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Collective, once. Waits until the Reducer has done what was launched, and ends. Throws
  // UsageError if the trace has ended or a microbatch is open, StepAbortedError if a rank has left
  // its Trace or cannot end it, MismatchError if a rank makes another collective call, and Error if
  // the file cannot be written.
  void write();
  // Ends without a file, as the destructor does, but for a reason that the other ranks are told.
  // Does nothing if the trace has ended.
  void leave(std::string_view reason) noexcept;

 private:
  friend Trace begin_trace(Reducer& reducer, const std::filesystem::path& path,
                           TraceSettings settings);
  Trace(Reducer& reducer, const std::filesystem::path& path, TraceSettings settings);

  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp
