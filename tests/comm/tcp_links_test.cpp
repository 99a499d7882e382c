// The TCP connections of a group: when they are made, while strangers knock or descriptors run out,
// and when one breaks.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <thread>

#include "hsdp/comm/host/tcp_channel.h"
#include "hsdp/comm/unique_fd.h"
#include "hsdp/error.h"
#include "tests/comm/elements.h"
#include "tests/comm/rank_threads.h"
#include "tests/comm/tcp_door.h"

namespace hsdp::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

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
    const std::string hello = std::string("hsdptcp2") + std::string("\1\0\0\0\0\0\0\0", 8);
    for (const std::string& text :
         {std::string(1'000, 'g'), std::string("GET / HTTP/1.1\r\n\r\n"), std::string("hsdp"),
          std::string(), hello, hello + std::string(1'000, 'x')}) {  // all without the token
      sockets_.push_back(knock(address));
      EXPECT_EQ(::send(sockets_.back().get(), text.data(), text.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(text.size()));
    }
    knock(address);  // and one that leaves at once
  }
  // More than a listener hears at once, all silent.
  void crowd(const std::string& address) {
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < 100; ++i) sockets_.push_back(knock(address));
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
  EXPECT_EQ(strangers.count(), 24U);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

TEST(TcpLinks, ACommonSecretIsProven) {
  Strangers strangers;
  expect_all_reduce_works(
      {.size = 4,
       .path = Path::kTcp,
       .stage = {.secret = "the job's",
                 .on_address = [&](const std::string& address) { strangers.come(address); }}});
}

std::vector<int> open_sockets() {
  std::vector<int> sockets;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the directory's own descriptor
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:")) sockets.push_back(std::stoi(entry.path().filename()));
  }
  return sockets;
}

// By a raw system call: to ThreadSanitizer connect() on another thread's socket is a data race.
void reset(int socket) {
  const sockaddr nowhere{.sa_family = AF_UNSPEC, .sa_data = {}};
  EXPECT_EQ(::syscall(SYS_connect, socket, &nowhere, sizeof nowhere), 0);
}

std::uint16_t port_of(const std::string& address) {
  std::string host;
  std::uint16_t port = 0;
  std::istringstream(address) >> host >> port;
  return port;
}

// Breaks the call of a rank of this process to that port, once it is connected; false after ten
// seconds.
bool break_call_to(std::uint16_t port) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (std::chrono::steady_clock::now() < end) {
    for (const int socket : open_sockets()) {
      sockaddr_in peer{};
      socklen_t size = sizeof peer;
      if (::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
      if (peer.sin_family != AF_INET || ntohs(peer.sin_port) != port) continue;
      reset(socket);
      return true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// A listener may drop a member among strangers, before or after it was heard.
TEST(TcpLinks, AMemberThatIsTurnedAwayCallsAgain) {
  bool broken = false;
  expect_all_reduce_works({.size = 2,
                           .path = Path::kTcp,
                           .stage = {.before_connecting = [&](int rank, const auto& addresses) {
                             if (rank == 0) broken = break_call_to(port_of(addresses[0]));
                           }}});
  EXPECT_TRUE(broken);
}

TEST(TcpLinks, ACrowdOfStrangersPushesNobodyOut) {
  Strangers strangers;
  expect_all_reduce_works(
      {.size = 4, .path = Path::kTcp, .stage = {.on_address = [&](const std::string& address) {
                                        strangers.crowd(address);
                                      }}});
  EXPECT_EQ(strangers.count(), 400U);
}

// What each of two ranks is told by an all-reduce that fails so.
template <typename Failure>
std::vector<std::string> failures_of_two(std::chrono::seconds timeout,
                                         const std::function<Stage(std::size_t rank)>& stage_of) {
  const auto controls = comm::in_process_control(2, timeout);
  std::vector<std::string> messages(2);
  run_each(2, [&](std::size_t r) {
    const Stage stage = stage_of(r);
    Communicator world =
        comm::host_world(std::make_shared<StageControl>(controls[r], stage), TransportChoice::kTcp);
    std::vector<float> data(1'000);
    try {
      world.all_reduce(TensorView{data.data(), 1'000});
    } catch (const Failure& error) {
      messages[r] = error.what();
    }
  });
  return messages;
}

TEST(TcpLinks, AnotherSecretIsRefused) {
  const auto messages = failures_of_two<RankError>(std::chrono::seconds(2), [](std::size_t r) {
    return Stage{.secret = r == 0 ? "the job's" : "another"};
  });
  EXPECT_THAT(messages[0], HasSubstr("connect"));
  EXPECT_EQ(messages[0], messages[1]);
}

// A port at which packets are dropped: the queue of its listener is full.
class SilentPort {
 public:
  SilentPort() {
    sockaddr_in address = comm::loopback(0);
    socklen_t size = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener_.get(), generic, size), 0);
    EXPECT_EQ(::listen(listener_.get(), 0), 0);
    EXPECT_EQ(::getsockname(listener_.get(), generic, &size), 0);
    port_ = ntohs(address.sin_port);
    for (int i = 0; i < 16; ++i) {
      callers_.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      static_cast<void>(::connect(callers_.back().get(), generic, size));
    }
  }
  [[nodiscard]] std::string number() const { return std::to_string(port_); }

 private:
  comm::UniqueFd listener_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::vector<comm::UniqueFd> callers_;
  int port_ = 0;
};

TEST(TcpLinks, ThatAreDroppedNameTheAddress) {
  const SilentPort silent;
  const Stage stage{.told_address = [&](int rank, const std::string& address) {
    return rank == 0 ? "127.0.0.1 " + silent.number() + " token" : address;
  }};
  const auto messages =
      failures_of_two<TimeoutError>(std::chrono::seconds(4), [&](std::size_t) { return stage; });
  EXPECT_THAT(
      messages[0],
      AllOf(HasSubstr("tcp: cannot connect to rank 0 of 2 at 127.0.0.1:" + silent.number() +
                      ": no answer within "),
            HasSubstr("has too many callers; let the hosts connect to each other at any port")));
  EXPECT_EQ(messages[0], messages[1]);
}

TEST(TcpLinks, AreMadeByTheFirstCallThatMovesData) {
  constexpr int kSize = 4;
  const std::size_t before = open_sockets().size();
  auto worlds = make_worlds({.size = kSize, .path = Path::kTcp});
  std::vector<Communicator> groups(kSize);
  std::vector<SharedMemory> memory(kSize);
  run_each(kSize, [&](std::size_t r) {
    groups[r] = worlds[r].split(0, -static_cast<int>(r));
    memory[r] = groups[r].allocate(1'000, Dtype::kF32);
    groups[r].barrier();
    double rank = groups[r].rank();
    groups[r].all_reduce(TensorView{&rank, 1, Dtype::kF64});
    EXPECT_EQ(rank, 6.0);
  });
  EXPECT_EQ(open_sockets().size(), before);
  const auto all_reduce = [&](std::size_t r) {
    std::vector<float> data(1'000, static_cast<float>(r));
    groups[r].all_reduce(TensorView{data.data(), 1'000});
    EXPECT_EQ(data, std::vector<float>(1'000, 6.0F));
  };
  for (int round = 0; round < 2; ++round) {
    run_each(kSize, all_reduce);
    EXPECT_EQ(open_sockets().size(), before + kSize * (kSize - std::size_t{1}));
  }
}

TEST(TcpLinks, CarryCallsThatAreCompared) {
  run_world({.size = 3, .path = Path::kTcp}, [](Communicator& world) {
    std::vector<float> data(1'000, 1.0F);
    world.all_reduce(TensorView{data.data(), 1'000});
    try {
      world.all_reduce(TensorView{data.data(), world.rank() == 1 ? 10 : 1'000});
      ADD_FAILURE() << "no error";
    } catch (const MismatchError& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{1});
    }
    EXPECT_EQ(data, std::vector<float>(1'000, 3.0F));
  });
}

// A number that travels with the calls has the bits of one that travels by links.
TEST(TcpLinks, DoNotChangeTheBitsOfANumber) {
  run_world({.size = 5, .path = Path::kTcp}, [](Communicator& world) {
    const auto bits = [&](Dtype dtype, float divisor) {
      std::vector<std::uint64_t> memory(8);
      const TensorView data{memory.data(), 5, dtype};
      for (std::int64_t i = 0; i < data.count; ++i) {
        set(data, i, 1.0 / (3.0 + static_cast<double>(i) + 7.0 * world.rank()));
      }
      world.all_reduce({.data = data, .divisor = divisor});
      return memory;
    };
    std::vector<std::vector<std::uint64_t>> found[2];
    for (auto& results : found) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
        results.push_back(bits(dtype, 3.0F));
      }
      results.push_back(bits(Dtype::kF64, 1.0F));
      std::vector<float> large(1'000);
      world.all_reduce(TensorView{large.data(), 1'000});  // makes the links
    }
    EXPECT_EQ(found[0], found[1]);
  });
}

// The soft limit of this process' descriptors, for a while.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t limit) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit lower{.rlim_cur = limit, .rlim_max = before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &lower);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit before_{};
};

TEST(TcpLinks, WithoutDescriptorsAreAnErrorOnAllThatCanBeMended) {
  constexpr int kSize = 6;
  auto worlds = make_worlds({.size = kSize, .path = Path::kTcp});
  const auto sum = [&](std::size_t r) {
    std::vector<float> data(1'000, static_cast<float>(r));
    worlds[r].all_reduce(TensorView{data.data(), 1'000});
    EXPECT_EQ(data, std::vector<float>(1'000, 15.0F));
  };
  std::vector<std::string> messages(kSize);
  {
    const comm::UniqueFd lowest_free(::dup(0));
    const DescriptorLimit limit(static_cast<rlim_t>(lowest_free.get()) + 10);
    run_each(kSize, [&](std::size_t r) {
      try {
        sum(r);
      } catch (const Error& error) {
        messages[r] = error.what();
      }
    });
  }
  EXPECT_THAT(messages[0], AllOf(HasSubstr("links to 5 peers"), HasSubstr("ulimit -n"),
                                 HasSubstr("engine 'mpi'"), HasSubstr("of 6)")));
  EXPECT_THAT(messages, testing::Each(messages[0]));
  run_each(kSize, sum);
}

TEST(TcpLinks, BrokenWhileThePeersLiveAreAnErrorThatNamesARank) {
  const auto before = open_sockets();
  auto worlds = make_worlds({.size = 2, .path = Path::kTcp});
  std::vector<std::string> messages(2);
  run_each(2, [&](std::size_t r) {
    std::vector<float> data(1'000);
    worlds[r].all_reduce(TensorView{data.data(), 1'000});
  });
  for (const int socket : open_sockets()) {
    if (std::ranges::find(before, socket) != before.end()) continue;
    reset(socket);
    break;
  }
  run_each(2, [&](std::size_t r) {
    std::vector<float> data(1'000);
    try {
      worlds[r].all_reduce({.data = {data.data(), 1'000}, .bucket = 2});
    } catch (const PeerLostError& error) {
      messages[r] = error.what();
      EXPECT_EQ(error.ranks().size(), 1U);
    }
  });
  EXPECT_THAT(messages[0], HasSubstr(" of 2 was lost ("));
  EXPECT_EQ(messages[0], messages[1]);
}

// Control finds dead peers; a stopped one is none.
TEST(TcpLinks, JudgeNoPeerDead) {
  const auto before = open_sockets();
  auto worlds = make_worlds({.size = 2, .path = Path::kTcp});
  run_each(2, [&](std::size_t r) {
    std::vector<float> data(1'000);
    worlds[r].all_reduce(TensorView{data.data(), 1'000});
  });
  for (const int socket : open_sockets()) {
    if (std::ranges::find(before, socket) != before.end()) continue;
    int keepalive = 1;
    int user_timeout = 1;
    socklen_t size = sizeof(int);
    EXPECT_EQ(::getsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &keepalive, &size), 0);
    EXPECT_EQ(::getsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout, &size), 0);
    EXPECT_EQ(keepalive, 0);
    EXPECT_EQ(user_timeout, 0);
  }
}

TEST(TcpMessage, LeavesAGroupBelowItsBufferBytes) {
  for (int size = 2; size <= 8192; ++size) {
    const std::size_t message = comm::tcp_message_bytes(size);
    const std::size_t held =
        (2 * (static_cast<std::size_t>(size) - 1) + comm::kStagedMessages) * message;
    ASSERT_LE(held, std::size_t{16} << 20) << size;
    ASSERT_GT(message, 0U) << size;
    ASSERT_EQ(message % 64, 0U) << size;
  }
  EXPECT_EQ(comm::tcp_message_bytes(2), std::size_t{256} << 10);
  EXPECT_EQ(comm::tcp_message_bytes(30), std::size_t{256} << 10);
  EXPECT_GE(comm::tcp_message_bytes(100), std::size_t{80} << 10);
  EXPECT_GE(comm::tcp_message_bytes(500), std::size_t{16} << 10);
}

}  // namespace
}  // namespace hsdp::test
