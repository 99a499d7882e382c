// The limit of open files: told apart from other errors, so that ranks that join can wait until
// descriptors are free again, and named with its remedy when they are not
// [Note: the limit of open files].
#pragma once

#include <string>

#include "hsdp/error.h"

namespace hsdp::comm {

// A call for a descriptor met the limit.
class DescriptorLimitError : public Error {
 public:
  using Error::Error;
};

[[nodiscard]] bool is_descriptor_limit(int error);  // an errno: EMFILE, ENFILE
// "the limit of 1024 open files was reached; raise it with ulimit -n"
[[nodiscard]] std::string descriptor_limit_text();

// After a call that failed: throws when `errno` is the limit. `doing`: "rendezvous: cannot ...".
void throw_if_descriptor_limit(const std::string& doing);

}  // namespace hsdp::comm
