#include "real_library.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace hsdp::nccl_shim {
namespace {

constexpr const char* kVariable = "HSDP_NCCL_SHIM_OVER";

bool is_of_this_file(void* symbol) {
  Dl_info theirs{};
  Dl_info ours{};
  return ::dladdr(symbol, &theirs) != 0 && ::dladdr(kVariable, &ours) != 0 &&
         theirs.dli_fbase == ours.dli_fbase;
}

struct RealLibrary {
  void* file = nullptr;
  std::string error;

  RealLibrary() {
    const char* const path = std::getenv(kVariable);
    const std::string got = path == nullptr ? "nothing" : "'" + std::string(path) + "'";
    file = path == nullptr ? nullptr : ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    std::string reason;
    if (path != nullptr && file == nullptr) {
      reason = " (" + std::string(::dlerror()) + ")";
    } else if (file != nullptr && is_of_this_file(::dlsym(file, "ncclGetVersion"))) {
      reason = " (that is the shim)";
      file = nullptr;
    } else if (file != nullptr && ::dlsym(file, "ncclCommRegister") == nullptr) {
      // The shim has every function, so a program would take this library for a newer one.
      reason = " (it has no ncclCommRegister)";
      file = nullptr;
    }
    if (file != nullptr) return;
    error = std::string(kVariable) + ": expected the path of a libnccl.so.2, 2.19 or newer, got " +
            got + reason;
    std::fprintf(stderr, "nccl shim: %s\n", error.c_str());
  }
};

const RealLibrary& real_library() {
  static const auto* const one = new RealLibrary;  // never destroyed: threads may use it at exit
  return *one;
}

}  // namespace

void* real_symbol(const char* name) {
  void* const file = real_library().file;
  return file == nullptr ? nullptr : ::dlsym(file, name);
}

const std::string& open_error() { return real_library().error; }

}  // namespace hsdp::nccl_shim
