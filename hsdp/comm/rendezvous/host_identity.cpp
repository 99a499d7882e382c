#include "hsdp/comm/rendezvous/host_identity.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "hsdp/comm/descriptor_limit.h"
#include "hsdp/comm/rendezvous/handshake.h"

namespace hsdp::comm {

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (boot.empty()) require_free_descriptor("rendezvous: cannot tell which host this is");
  struct stat network {};
  if (boot.empty() || ::stat("/proc/self/ns/net", &network) != 0) {
    // Nothing is known, so nobody is on the same host: a name that no other process has.
    return "unknown/" + random_secret();
  }
  return boot + "/" + std::to_string(::geteuid()) + "/" + std::to_string(network.st_ino);
}

}  // namespace hsdp::comm
