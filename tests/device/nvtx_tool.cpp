// A profiler: NVTX loads it into the process and calls it for each range. It keeps one list of what
// it was told: "push 7 hsdp:word" with the thread's number, or "pop 7".
#include <nvtx3/nvToolsExt.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <string>

namespace {

std::mutex mutex;
std::string told;

void tell(const std::string& what, const std::string& text) {
  const std::scoped_lock lock(mutex);
  told += what + " " + std::to_string(::syscall(SYS_gettid)) + text + "\n";
}

nvtxDomainHandle_t create(const char* name) {
  tell("domain", std::string(" ") + name);
  return reinterpret_cast<nvtxDomainHandle_t>(&told);
}
int push(nvtxDomainHandle_t /*domain*/, const nvtxEventAttributes_t* range) {
  tell("push", std::string(" ") + range->message.ascii);
  return 0;
}
int pop(nvtxDomainHandle_t /*domain*/) {
  tell("pop", "");
  return 0;
}

}  // namespace

extern "C" {

const char* nvtx_tool_told() {
  const std::scoped_lock lock(mutex);
  return ::strdup(told.c_str());
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int count = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &count) == 0) return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
}
