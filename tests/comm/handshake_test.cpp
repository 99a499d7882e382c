// The proof of the job's secret, against peers that know it and peers that do anything else.
#include "hsdp/comm/rendezvous/handshake.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
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

TEST(HandshakeTest, TwoOfTheSameRoleAreRefused) {
  for (const HandshakeRole role : {HandshakeRole::kConnecting, HandshakeRole::kAccepting}) {
    Pair pair = connected();
    auto other = std::async(std::launch::async, [&] {
      return prove_secret(pair.accepting.get(), role, "s", "c", kShort);
    });
    EXPECT_FALSE(prove_secret(pair.connecting.get(), role, "s", "c", kShort));
    EXPECT_FALSE(other.get());
  }
}

// What a side says is of no use to send it back: the classic reflection.
TEST(HandshakeTest, AnEchoProvesNothing) {
  for (const HandshakeRole role : {HandshakeRole::kConnecting, HandshakeRole::kAccepting}) {
    Pair pair = connected();
    auto echo = std::async(std::launch::async, [&] {
      std::array<char, 256> bytes{};
      for (;;) {
        const ssize_t n = ::recv(pair.accepting.get(), bytes.data(), bytes.size(), 0);
        if (n <= 0) return;
        if (::send(pair.accepting.get(), bytes.data(), static_cast<std::size_t>(n), MSG_NOSIGNAL) !=
            n) {
          return;
        }
      }
    });
    EXPECT_FALSE(prove_secret(pair.connecting.get(), role, "secret", "c", kShort));
    pair.connecting.reset();
    echo.get();
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

void expect_refused(const std::string& bytes, bool then_close) {
  for (const HandshakeRole role : {HandshakeRole::kConnecting, HandshakeRole::kAccepting}) {
    Pair pair = connected();
    ASSERT_EQ(::send(pair.accepting.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    if (then_close) pair.accepting.reset();
    const auto begin = Clock::now();
    EXPECT_FALSE(prove_secret(pair.connecting.get(), role, "secret", "c", kShort));
    EXPECT_LT(Clock::now() - begin, kShort + milliseconds(15'000));
  }
}

TEST(HandshakeTest, SilenceGarbageAndEarlyEndsAreRefusedInTime) {
  for (const bool then_close : {false, true}) {
    expect_refused("", then_close);
    expect_refused("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", then_close);
    expect_refused(std::string(4096, '\xff'), then_close);
    expect_refused("hsdphsk1", then_close);
    expect_refused("hsdphsk1" + std::string(64, 'x'), then_close);
  }
}

// A peer that sends a byte now and then does not stretch the deadline.
TEST(HandshakeTest, ASlowPeerIsRefusedAtTheDeadline) {
  Pair pair = connected();
  std::atomic<bool> done{false};
  auto slow = std::async(std::launch::async, [&] {
    while (!done) {
      if (::send(pair.accepting.get(), "h", 1, MSG_NOSIGNAL) != 1) return;
      std::this_thread::sleep_for(milliseconds(20));
    }
  });
  const auto begin = Clock::now();
  EXPECT_FALSE(
      prove_secret(pair.connecting.get(), HandshakeRole::kAccepting, "secret", "c", kShort));
  EXPECT_LT(Clock::now() - begin, kShort + milliseconds(15'000));
  done = true;
  slow.get();
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
