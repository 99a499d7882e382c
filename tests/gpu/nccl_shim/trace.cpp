#include "trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string_view>

namespace hsdp::nccl_shim {
namespace {

constexpr const char* kFolder = "HSDP_NCCL_SHIM_TRACE";
constexpr const char* kFatal = "HSDP_NCCL_SHIM_FATAL";

std::string file_name() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return std::string(host.data()) + "-" + std::to_string(::getpid()) + ".jsonl";
}

struct Trace {
  int file = -1;
  std::mutex mutex;
  std::set<std::string> said;  // the rules already reported to stderr

  Trace() {
    const char* const folder = std::getenv(kFolder);
    if (folder == nullptr) return;
    const std::string path = std::string(folder) + "/" + file_name();
    file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) {
      std::fprintf(stderr, "nccl shim: %s: expected a folder to write to, got '%s' (%s)\n", kFolder,
                   folder, std::strerror(errno));
    }
  }
};

Trace& trace() {
  static auto* const one = new Trace;  // never destroyed: threads may use it during exit
  return *one;
}

std::string quoted(std::string_view text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return json + '"';
}
std::string number(std::optional<int> value) { return value ? std::to_string(*value) : "null"; }
std::string truth(std::optional<bool> value) { return !value ? "null" : *value ? "true" : "false"; }

// Writes the line at once, so that a killed process leaves whole lines.
void write_line(std::string line) {
  Trace& to = trace();
  if (to.file < 0) return;
  line += '\n';
  const std::lock_guard lock(to.mutex);
  std::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t written = ::write(to.file, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
}

void report(const char* kind, const std::string& rule, const std::string& text) {
  write_line(std::string(R"({"kind": )") + quoted(kind) + R"(, "rule": )" + quoted(rule) +
             R"(, "text": )" + quoted(text) + "}");
  {
    const std::lock_guard lock(trace().mutex);
    if (!trace().said.insert(kind + rule).second) return;
  }
  std::fprintf(stderr, "nccl shim: %s: %s: %s\n", kind, rule.c_str(), text.c_str());
}

}  // namespace

void trace_call(const Seat& seat, const TracedCall& call) {
  write_line(R"({"kind": "call", "communicator": )" + quoted(seat.communicator) + R"(, "ranks": )" +
             std::to_string(seat.size) + R"(, "rank": )" + std::to_string(seat.rank) +
             R"(, "world_rank": )" + std::to_string(seat.world_rank) + R"(, "sequence": )" +
             std::to_string(seat.sequence) + R"(, "group": )" + std::to_string(call.group) +
             R"(, "call": )" + quoted(call.name) + R"(, "peer": )" + number(call.peer) +
             R"(, "bytes": )" + std::to_string(call.bytes) + R"(, "dtype": )" + number(call.dtype) +
             R"(, "operation": )" + number(call.operation) + R"(, "in": )" + truth(call.in) +
             R"(, "out": )" + truth(call.out) + "}");
}

void report_violation(const std::string& rule, const std::string& text) {
  report("violation", rule, text);
  const char* const fatal = std::getenv(kFatal);
  if (fatal != nullptr && std::string_view(fatal) == "1") std::abort();
}

void report_note(const std::string& rule, const std::string& text) { report("note", rule, text); }

}  // namespace hsdp::nccl_shim
