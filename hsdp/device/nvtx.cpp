#include <nvtx3/nvToolsExt.h>

#include "hsdp/device/profiler.h"

namespace hsdp::profiler {
namespace {

// Null without a tool, which the process loads, if at all, before the first call.
nvtxDomainHandle_t domain() {
  static nvtxDomainHandle_t const own = nvtxDomainCreateA("hsdp");
  return own;
}

}  // namespace

bool is_watching() { return domain() != nullptr; }

void push(const char* text) {
  nvtxEventAttributes_t range{};
  range.version = NVTX_VERSION;
  range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  range.messageType = NVTX_MESSAGE_TYPE_ASCII;
  range.message.ascii = text;
  nvtxDomainRangePushEx(domain(), &range);
}

void pop() { nvtxDomainRangePop(domain()); }

}  // namespace hsdp::profiler
