// Calls of the C library that fail when a test says so, on the thread that says it. Linked into a
// program, they take the place of the library's.
#pragma once

namespace hsdp::test {

enum class FailingCall { kMemfdCreate, kPthreadCreate, kMadvise };

// This thread's next such call but `skipped` fails, as for want of memory.
void fail_call(FailingCall call, int skipped);
// Forgets it. True when the call has failed.
[[nodiscard]] bool call_has_failed();

}  // namespace hsdp::test
