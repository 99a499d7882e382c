// Calls of the C library that fail on the thread of a test that asks for it. Linked into a program,
// they replace the library's.
#pragma once

namespace hsdp::test {

enum class FailingCall { kMemfdCreate, kPthreadCreate, kMadvise };

// This thread's next such call after `skipped` others fails, as if memory had run out.
void fail_call(FailingCall call, int skipped);
// Ends that. Returns whether the call has failed.
[[nodiscard]] bool call_has_failed();

}  // namespace hsdp::test
