// What a job says while it runs, a line each: what was made at kInfo, each step at kDebug. Lines go
// to stderr, or to the sink that the Python package sets.
//
// Without a sink, stderr gets warnings and what HSDP_LOG asks for. Make a text only where
// is_logged() says so: it is a few loads. Thread-safe.
#pragma once

#include <string>

namespace hsdp {

enum class LogLevel { kDebug = 10, kInfo = 20, kWarning = 30 };  // the numbers of Python's logging

// Obeys HSDP_LOG from now on. Throws UsageError unless it is empty or, in any case of letters,
// warning, info or debug.
void read_log_level();
[[nodiscard]] bool is_logged(LogLevel level);
// Does nothing if the level is not logged. Puts "hsdp: " in front.
void log_line(LogLevel level, const std::string& text);

// Sends lines of at least `level` to `sink`, from any thread. Lower ones go to stderr if HSDP_LOG
// asks for them, warnings included. nullptr removes the sink.
using LogSink = void (*)(LogLevel level, std::string line);
void set_log_sink(LogSink sink, int level);

}  // namespace hsdp
