#include "hsdp/comm/rendezvous/read_file.h"

#include <fstream>
#include <sstream>
#include <utility>

namespace hsdp::comm {

std::optional<std::string> read_file(const std::string& path) {
  const std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) return std::nullopt;
  // Unlike iterators over the file, this throws nothing when a read fails.
  std::ostringstream text;
  text << file.rdbuf();
  if (text.bad()) return std::nullopt;
  return std::move(text).str();
}

}  // namespace hsdp::comm
