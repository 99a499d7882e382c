#include "hsdp/comm/descriptor_limit.h"

#include <sys/resource.h>

#include <cerrno>

namespace hsdp::comm {

bool is_descriptor_limit(int error) { return error == EMFILE || error == ENFILE; }

std::string descriptor_limit_text() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return "the limit of " + std::to_string(limit.rlim_cur) +
         " open files was reached; raise it with ulimit -n";
}

void throw_if_descriptor_limit(const std::string& doing) {
  if (is_descriptor_limit(errno))
    throw DescriptorLimitError(doing + ": " + descriptor_limit_text());
}

}  // namespace hsdp::comm
