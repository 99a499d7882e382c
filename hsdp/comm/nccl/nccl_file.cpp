#include "hsdp/comm/nccl/nccl_file.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

constexpr const char* kLibraryName = "libnccl.so.2";
constexpr const char* kPathVariable = "HSDP_NCCL_LIBRARY";

std::string text_of_variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// Why the last dlopen failed.
std::string loader_error() {
  const char* const text = ::dlerror();
  return text == nullptr ? "no reason" : text;
}

// Where NCCL's wheel may be: next to this library in a Python package, and in the active virtual
// environment.
std::vector<std::filesystem::path> wheel_files() {
  const std::filesystem::path in_packages =
      std::filesystem::path("nvidia") / "nccl" / "lib" / kLibraryName;
  std::vector<std::filesystem::path> files;
  static const char here = 0;
  const std::filesystem::path self = file_of_symbol(const_cast<char*>(&here));  // NOLINT: unwritten
  if (self.has_parent_path()) files.push_back(self.parent_path() / ".." / in_packages);
  const std::string environment = text_of_variable("VIRTUAL_ENV");
  if (environment.empty()) return files;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(environment + "/lib", ignored)) {
    files.push_back(entry.path() / "site-packages" / in_packages);
  }
  return files;
}

void* open_named_file(const std::string& path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  throw UsageError(std::string("nccl: cannot open ") + kPathVariable +
                   ": expected the path of a libnccl.so.2, got '" + path + "' (" + loader_error() +
                   ")");
}

}  // namespace

std::string file_of_symbol(void* symbol) {
  Dl_info info{};
  if (::dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return {};
  return info.dli_fname;
}

void* open_nccl_file() {
  const std::string named = text_of_variable(kPathVariable);
  if (!named.empty()) return open_named_file(named);
  if (void* const loaded = ::dlopen(kLibraryName, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  if (void* const found = ::dlopen(kLibraryName, RTLD_NOW | RTLD_LOCAL)) return found;
  const std::string reason = loader_error();
  for (const std::filesystem::path& file : wheel_files()) {
    std::error_code ignored;
    if (!std::filesystem::exists(file, ignored)) continue;
    if (void* const found = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return found;
  }
  throw UsageError(std::string("nccl: expected ") + kLibraryName + " 2.18 or newer, got none (" +
                   reason +
                   "); install NCCL (the package libnccl2, or pip install nvidia-nccl-cu13), or "
                   "name the file in " +
                   kPathVariable);
}

}  // namespace hsdp::comm
