// Reads a file as text.
#pragma once

#include <optional>
#include <string>

namespace hsdp::comm {

// The whole file. Nothing, with errno set, if it is missing or cannot be read to its end: a
// directory, or a file under /proc whose process ends meanwhile.
[[nodiscard]] std::optional<std::string> read_file(const std::string& path);

}  // namespace hsdp::comm
