// Making the TCP connections of a group while strangers knock.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <mutex>
#include <sstream>

#include "hsdp/comm/unique_fd.h"
#include "hsdp/error.h"
#include "tests/comm/elements.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::test {
namespace {

// Connects to an address as the ranks tell it each other: "IP PORT TOKEN".
comm::UniqueFd knock(const std::string& address) {
  std::string host;
  std::uint16_t port = 0;
  std::istringstream(address) >> host >> port;
  comm::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  inet_pton(AF_INET, host.c_str(), &to.sin_addr);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  return socket;
}

// Strangers that stay connected while the ranks meet.
class Strangers {
 public:
  void come(const std::string& address) {
    const std::lock_guard lock(mutex_);
    std::string hello("hsdptcp1");
    hello += std::string(32, 'x') + std::string("\1\0\0\0\0\0\0\0", 8);  // another token
    for (const std::string& text : {std::string(1'000, 'g'), std::string("GET / HTTP/1.1\r\n\r\n"),
                                    std::string("hsdp"), std::string(), hello}) {
      sockets_.push_back(knock(address));
      EXPECT_EQ(::send(sockets_.back().get(), text.data(), text.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(text.size()));
    }
    knock(address);  // and one that leaves at once
  }
  [[nodiscard]] std::size_t count() const { return sockets_.size(); }

 private:
  std::mutex mutex_;
  std::vector<comm::UniqueFd> sockets_;
};

void expect_all_reduce_works(const WorldShape& shape) {
  run_world(shape, [&](Communicator& world) {
    const Memory data(world, Path::kPrivate, 1'000, Dtype::kI64);
    for (std::int64_t i = 0; i < 1'000; ++i) set(data.view(), i, 1.0);
    world.all_reduce(data.view());
    EXPECT_EQ(get(data.view(), 999), shape.size);
  });
}

TEST(TcpLinks, StrangersDoNotDisturbAGroup) {
  Strangers strangers;
  const auto start = std::chrono::steady_clock::now();
  expect_all_reduce_works(
      {.size = 4, .path = Path::kTcp, .stage = {.on_address = [&](const std::string& address) {
                                        strangers.come(address);
                                      }}});
  EXPECT_EQ(strangers.count(), 20U);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
}

TEST(TcpLinks, ACommonSecretIsProven) {
  Strangers strangers;
  expect_all_reduce_works(
      {.size = 4,
       .path = Path::kTcp,
       .stage = {.secret = "the job's",
                 .on_address = [&](const std::string& address) { strangers.come(address); }}});
}

TEST(TcpLinks, AnotherSecretIsRefused) {
  const auto controls = comm::in_process_control(2, std::chrono::milliseconds(500));
  std::vector<std::string> messages(2);
  run_each(2, [&](std::size_t r) {
    const Stage stage{.secret = r == 0 ? "the job's" : "another"};
    try {
      static_cast<void>(comm::host_world(std::make_shared<StageControl>(controls[r], stage),
                                         TransportChoice::kTcp));
    } catch (const RankError& error) {
      messages[r] = error.what();
    }
  });
  EXPECT_FALSE(messages[0].empty());
  EXPECT_FALSE(messages[1].empty());
}

}  // namespace
}  // namespace hsdp::test
