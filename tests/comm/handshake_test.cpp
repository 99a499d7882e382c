// The proof of the job's secret, against peers that know it and peers that do anything else.
#include "hsdp/comm/rendezvous/handshake.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>

#include "hsdp/comm/rendezvous/secret_proof.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kDeadline{10'000};
constexpr milliseconds kShort{150};

struct Pair {
  UniqueFd connecting;
  UniqueFd accepting;
};

Pair connected() {
  std::array<int, 2> ends{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

struct Results {
  bool connecting;
  bool accepting;
};

Results both(const std::string& secret_a, const std::string& secret_b,
             const std::string& context_a = "c", const std::string& context_b = "c") {
  Pair pair = connected();
  auto other = std::async(std::launch::async, [&] {
    const bool proven = prove_secret(pair.accepting.get(), HandshakeRole::kAccepting, secret_b,
                                     context_b, kDeadline);
    if (!proven) pair.accepting.reset();
    return proven;
  });
  const bool proven = prove_secret(pair.connecting.get(), HandshakeRole::kConnecting, secret_a,
                                   context_a, kDeadline);
  if (!proven) pair.connecting.reset();
  return {proven, other.get()};
}

TEST(HandshakeTest, BothSidesKnowTheSecret) {
  const Results results = both("secret", "secret");
  EXPECT_TRUE(results.connecting);
  EXPECT_TRUE(results.accepting);
}

TEST(HandshakeTest, AnotherSecretOrContextIsRefusedByBoth) {
  for (const Results results :
       {both("secret", "Secret"), both("secret", ""), both("", "secret"),
        both("secret", "secret", "control", "data"), both("secret", "secret", "c", "cc")}) {
    EXPECT_FALSE(results.connecting);
    EXPECT_FALSE(results.accepting);
  }
}

TEST(HandshakeTest, TheAcceptingSideProvesNothingToAStranger) {
  SecretProof accepting(HandshakeRole::kAccepting, "secret", "c");
  SecretProof stranger(HandshakeRole::kConnecting, "guess", "c");
  accepting.received(stranger.outgoing());
  stranger.sent();
  stranger.received(accepting.outgoing());
  accepting.sent();
  accepting.received(stranger.outgoing());
  EXPECT_EQ(accepting.step(), SecretProof::Step::kRefused);
}

// Sends `bytes` from the end `fd`.
auto say(const std::string& bytes) {
  return [bytes](int fd, HandshakeRole /*role*/) {
    EXPECT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
  };
}

void echo(int fd, HandshakeRole /*role*/) {
  std::array<char, 256> bytes{};
  for (ssize_t n = 0; (n = ::recv(fd, bytes.data(), bytes.size(), 0)) > 0;) {
    if (::send(fd, bytes.data(), static_cast<std::size_t>(n), MSG_NOSIGNAL) != n) return;
  }
}

void say_a_byte_now_and_then(int fd, HandshakeRole /*role*/) {
  while (::send(fd, "h", 1, MSG_NOSIGNAL) == 1) std::this_thread::sleep_for(milliseconds(20));
}

void play_the_same_role(int fd, HandshakeRole role) {
  EXPECT_FALSE(prove_secret(fd, role, "secret", "c", kShort));
}

// Sending back what a side said does not help: the classic reflection attack. A peer that sends a
// byte now and then does not extend the deadline.
TEST(HandshakeTest, PeersThatProveNothingAreRefusedInTime) {
  const struct {
    std::string title;
    std::function<void(int fd, HandshakeRole role_of_other_end)> act;
  } peers[] = {{"silent", say("")},
               {"another protocol", say("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")},
               {"garbage", say(std::string(4096, '\xff'))},
               {"half a hello", say("hsdphsk1")},
               {"a wrong proof", say("hsdphsk1" + std::string(64, 'x'))},
               {"an echo", echo},
               {"slow", say_a_byte_now_and_then},
               {"of the same role", play_the_same_role}};
  for (const auto& peer : peers) {
    for (const HandshakeRole role : {HandshakeRole::kConnecting, HandshakeRole::kAccepting}) {
      for (const bool leaves : {false, true}) {
        SCOPED_TRACE(peer.title);
        Pair pair = connected();
        auto acts = std::async(std::launch::async, [&] {
          peer.act(pair.accepting.get(), role);
          if (leaves) ::shutdown(pair.accepting.get(), SHUT_RDWR);
        });
        const auto begin = Clock::now();
        EXPECT_FALSE(prove_secret(pair.connecting.get(), role, "secret", "c", kShort));
        EXPECT_LT(Clock::now() - begin, kShort + milliseconds(15'000));
        pair.connecting.reset();
        acts.get();
      }
    }
  }
}

TEST(HandshakeTest, TheBlockingModeIsKept) {
  for (const int flags : {0, O_NONBLOCK}) {
    Pair pair = connected();
    ::fcntl(pair.connecting.get(), F_SETFL, flags);
    pair.accepting.reset();
    EXPECT_FALSE(prove_secret(pair.connecting.get(), HandshakeRole::kConnecting, "s", "c", kShort));
    EXPECT_EQ(::fcntl(pair.connecting.get(), F_GETFL) & O_NONBLOCK, flags);
  }
}

TEST(HandshakeTest, RandomSecretsDiffer) {
  const std::string one = random_secret();
  EXPECT_EQ(one.size(), 64U);
  EXPECT_EQ(one.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(one, random_secret());
}

}  // namespace
}  // namespace hsdp::comm
