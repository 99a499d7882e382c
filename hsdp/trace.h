// A trace of a block of code: what the Reducers and lanes of all ranks did in it, on one clock, in
// one file that Perfetto and chrome://tracing open.
//
//   hsdp::Trace trace(reducer, "trace.json");
//   for (...) step();
//   trace.write();
//
// Ownership: the Reducer outlives the Trace. A world has one at a time. It keeps the first 65,536
// operations of each rank; the file says how many came after them.
// Threads: one at a time, that of the Reducer's calls. Every rank of the Reducer's mesh makes the
// Trace and writes it, in the same order among its collective calls.
// Errors: what goes wrong on one rank is an error on all, and leaves no file; a lost rank is a
// PeerLostError. A Trace that is destroyed without write() tells the other ranks and waits for
// none: their write() throws a StepAbortedError, and nothing is written.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "hsdp/reducer.h"

namespace hsdp {

class Trace {
 public:
  // Collective: begins the trace. Only the path of the mesh's first rank is used. Throws UsageError
  // if a trace runs, and Error if the file cannot be made.
  Trace(Reducer& reducer, const std::filesystem::path& path);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Collective: waits until the Reducer's launched work is done, ends the trace and writes the
  // file. Call it once.
  void write();
  // As the destructor, with a reason for the other ranks.
  void leave(std::string_view reason) noexcept;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp
