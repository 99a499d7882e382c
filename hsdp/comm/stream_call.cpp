#include "hsdp/comm/stream_call.h"

#include <exception>
#include <utility>

namespace hsdp::comm {
namespace {

struct OpenCall {
  std::exception_ptr error;
};
thread_local OpenCall* open_call = nullptr;

}  // namespace

void run_on_stream(Stream& stream, std::function<void()> task) {
  OpenCall call;
  OpenCall* const outer = std::exchange(open_call, &call);
  struct Restore {
    OpenCall* outer;
    ~Restore() { open_call = outer; }
  } const restore{outer};
  // Only the thread inside this very call sees `open_call` point at it.
  stream.run([task = std::move(task), mine = &call] {
    try {
      task();
    } catch (...) {
      if (open_call == mine) mine->error = std::current_exception();
      throw;
    }
  });
  if (call.error) std::rethrow_exception(call.error);
}

}  // namespace hsdp::comm
