#include "hsdp/device/memory_source.h"

#include <mutex>
#include <utility>

namespace hsdp {
namespace {

struct Current {
  std::mutex mutex;
  std::shared_ptr<const MemorySource> source = std::make_shared<const MemorySource>();
};

Current& current() {
  static auto* const one = new Current;  // the library's threads may allocate at exit
  return *one;
}

}  // namespace

void set_memory_source(MemorySource source) {
  auto next = std::make_shared<const MemorySource>(std::move(source));
  const std::lock_guard lock(current().mutex);
  current().source.swap(next);
}

std::shared_ptr<const MemorySource> memory_source() {
  const std::lock_guard lock(current().mutex);
  return current().source;
}

}  // namespace hsdp
