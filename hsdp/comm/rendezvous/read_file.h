// A file as text.
#pragma once

#include <optional>
#include <string>

namespace hsdp::comm {

// All of the file; nothing, and errno, when it is not there or cannot be read to its end: a
// directory, or a file under /proc whose process ends meanwhile.
[[nodiscard]] std::optional<std::string> read_file(const std::string& path);

}  // namespace hsdp::comm
