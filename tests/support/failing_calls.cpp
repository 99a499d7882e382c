#include "tests/support/failing_calls.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <optional>
#include <utility>

namespace hsdp::test {
namespace {

struct Order {
  FailingCall call = FailingCall::kMemfdCreate;
  int skipped = 0;
};
thread_local std::optional<Order> order;
thread_local bool failed = false;

bool fails(FailingCall call) {
  if (!order || order->call != call || order->skipped-- > 0) return false;
  order.reset();
  failed = true;
  return true;
}

template <typename Function>
Function library_call(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

void fail_call(FailingCall call, int skipped) {
  order = {call, skipped};
  failed = false;
}

bool call_has_failed() {
  order.reset();
  return std::exchange(failed, false);
}

}  // namespace hsdp::test

extern "C" {

int memfd_create(const char* name, unsigned int flags) noexcept {
  if (hsdp::test::fails(hsdp::test::FailingCall::kMemfdCreate)) {
    errno = ENOMEM;
    return -1;
  }
  static const auto real =
      hsdp::test::library_call<int (*)(const char*, unsigned int)>("memfd_create");
  return real(name, flags);
}

// For memory that the library needs at once.
int madvise(void* address, std::size_t length, int advice) noexcept {
  if (hsdp::test::fails(hsdp::test::FailingCall::kMadvise)) {
    errno = ENOMEM;
    return -1;
  }
  static const auto real = hsdp::test::library_call<int (*)(void*, std::size_t, int)>("madvise");
  return real(address, length, advice);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) noexcept {
  if (hsdp::test::fails(hsdp::test::FailingCall::kPthreadCreate)) return EAGAIN;
  using Function = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = hsdp::test::library_call<Function>("pthread_create");
  return real(thread, attributes, start, argument);
}

}  // extern "C"
