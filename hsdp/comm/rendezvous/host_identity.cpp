#include "hsdp/comm/rendezvous/host_identity.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "hsdp/comm/descriptor_limit.h"
#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/comm/rendezvous/read_file.h"

namespace hsdp::comm {

std::string host_identity() {
  const auto read = read_file("/proc/sys/kernel/random/boot_id");
  if (!read) throw_if_descriptor_limit("rendezvous: cannot tell which host this is");
  std::string boot = read.value_or("");
  boot.resize(std::min(boot.size(), boot.find('\n')));
  struct stat network {};
  if (boot.empty() || ::stat("/proc/self/ns/net", &network) != 0) {
    // The host is unknown, so use a unique name: no rank counts as being on the same host.
    return "unknown/" + random_secret();
  }
  return boot + "/" + std::to_string(::geteuid()) + "/" + std::to_string(network.st_ino);
}

}  // namespace hsdp::comm
