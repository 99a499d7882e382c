#include "hsdp/tools/master_address.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <string>

#include "hsdp/comm/unique_fd.h"

namespace hsdp::tools {
namespace {

constexpr const char* kAddress = "MASTER_ADDR";
constexpr const char* kPort = "MASTER_PORT";

// Returns 0 if there is none.
int free_port() {
  const comm::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);  // NOLINT
  socklen_t length = sizeof address;
  if (::bind(socket.get(), generic, length) != 0) return 0;
  if (::getsockname(socket.get(), generic, &length) != 0) return 0;
  return ntohs(address.sin_port);
}

}  // namespace

void offer_master_address() {
  if (std::getenv(kAddress) != nullptr || std::getenv(kPort) != nullptr) return;
  const int port = free_port();
  if (port == 0) return;
  ::setenv(kAddress, "127.0.0.1", 1);
  ::setenv(kPort, std::to_string(port).c_str(), 1);
}

}  // namespace hsdp::tools
