// Tells the limit of open files apart from other errors, so that joining ranks can wait for free
// descriptors, and errors name the limit and its remedy [Note: the limit of open files].
#pragma once

#include <string>

#include "hsdp/error.h"

namespace hsdp::comm {

// A call for a descriptor hit the limit.
class DescriptorLimitError : public Error {
 public:
  using Error::Error;
};

[[nodiscard]] bool is_descriptor_limit(int error);  // an errno: EMFILE, ENFILE
// "the limit of 1024 open files was reached; raise it with ulimit -n"
[[nodiscard]] std::string descriptor_limit_text();

// Call it after a failed call: throws if `errno` is the limit. `doing`: "rendezvous: cannot ...".
void throw_if_descriptor_limit(const std::string& doing);

}  // namespace hsdp::comm
