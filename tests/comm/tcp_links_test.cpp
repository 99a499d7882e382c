// The TCP connections of a group: when they are made, while strangers connect or descriptors run
// out, and when one breaks.
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
#include "tests/support/thread_ranks.h"

namespace hsdp::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// From an address as the ranks tell it each other: "IP PORT TOKEN". The IP is this host's loopback.
int port_of(const std::string& address) {
  std::string host;
  int port = 0;
  std::istringstream(address) >> host >> port;
  EXPECT_EQ(host, "127.0.0.1");
  return port;
}

comm::UniqueFd knock(const std::string& address) { return comm::connect_to(port_of(address)); }

// Strangers that stay connected while the ranks meet.
class Strangers {
 public:
  void come(const std::string& address) {
    const std::lock_guard lock(mutex_);
    const std::string hello = std::string("hsdptcp2") + std::string("\1\0\0\0\0\0\0\0", 8);
    for (const std::string& text :
         {std::string(1'000, 'g'), std::string("GET / HTTP/1.1\r\n\r\n"), std::string("hsdp"),
          std::string(), hello, hello + std::string(1'000, 'x')}) {  // none with the token
      sockets_.push_back(knock(address));
      EXPECT_EQ(::send(sockets_.back().get(), text.data(), text.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(text.size()));
    }
    knock(address);  // and one that leaves at once
  }
  // More silent strangers than a listener serves at once.
  void crowd(const std::string& address) {
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < 100; ++i) sockets_.push_back(knock(address));
  }
  [[nodiscard]] std::size_t count() const { return sockets_.size(); }

 private:
  std::mutex mutex_;
  std::vector<comm::UniqueFd> sockets_;
};

void expect_all_reduce_works(int size, const Stage& stage) {
  run_world({.size = size, .path = Path::kTcp, .stage = stage}, [&](Communicator& world) {
    const Memory data(world, Path::kPrivate, 1'000, Dtype::kI64);
    fill(data.view(), [](std::int64_t /*i*/) { return 1; });
    world.all_reduce(data.view());
    expect_elements(data.view(), [&](std::int64_t /*i*/) { return size; });
  });
}

TEST(TcpLinks, StrangersDoNotDisturbAGroup) {
  for (const std::string secret : {"", "the job's"}) {
    SCOPED_TRACE(secret);
    Strangers strangers;
    const auto start = std::chrono::steady_clock::now();
    const auto come = [&](const std::string& address) { strangers.come(address); };
    expect_all_reduce_works(4, {.secret = secret, .on_address = come});
    EXPECT_EQ(strangers.count(), 24U);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
  }
}

TEST(TcpLinks, ACrowdOfStrangersPushesNobodyOut) {
  Strangers strangers;
  const auto crowd = [&](const std::string& address) { strangers.crowd(address); };
  expect_all_reduce_works(4, {.on_address = crowd});
  EXPECT_EQ(strangers.count(), 400U);
}

std::vector<int> open_sockets() {
  std::vector<int> sockets;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the descriptor of the directory
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:")) sockets.push_back(std::stoi(entry.path().filename()));
  }
  return sockets;
}

// A raw system call, as for ThreadSanitizer connect() on another thread's socket is a data race.
void reset(int socket) {
  const sockaddr nowhere{.sa_family = AF_UNSPEC, .sa_data = {}};
  EXPECT_EQ(::syscall(SYS_connect, socket, &nowhere, sizeof nowhere), 0);
}

// Breaks this process's connection to that port once it is made, and so a rank's call. False after
// ten seconds.
bool break_call_to(int port) {
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

// A listener may drop a member among the strangers, before or after it was heard.
TEST(TcpLinks, AMemberThatIsTurnedAwayCallsAgain) {
  bool broken = false;
  const auto break_one = [&](int rank, const std::vector<std::string>& addresses) {
    if (rank == 0) broken = break_call_to(port_of(addresses[0]));
  };
  expect_all_reduce_works(2, {.before_connecting = break_one});
  EXPECT_TRUE(broken);
}

// What both of two ranks are told when an all-reduce fails like that.
template <typename Failure>
std::string failure_of_two(std::chrono::seconds timeout,
                           const std::function<Stage(std::size_t rank)>& stage_of) {
  const auto controls = comm::in_process_control(2, timeout);
  std::vector<std::string> messages(2);
  run_each(2, [&](std::size_t r) {
    Communicator world = comm::host_world(std::make_shared<StageControl>(controls[r], stage_of(r)),
                                          TransportChoice::kTcp);
    std::vector<float> data(1'000);
    const auto error = caught<Failure>([&] { world.all_reduce(TensorView{data.data(), 1'000}); });
    if (error) messages[r] = error->what();
  });
  EXPECT_EQ(messages[0], messages[1]);
  return messages[0];
}

TEST(TcpLinks, AnotherSecretIsRefused) {
  EXPECT_THAT(failure_of_two<RankError>(
                  std::chrono::seconds(2),
                  [](std::size_t r) { return Stage{.secret = r == 0 ? "the job's" : "another"}; }),
              HasSubstr("connect"));
}

// The kernel drops packets to a listener whose queue is full.
TEST(TcpLinks, ThatAreDroppedNameTheAddress) {
  const comm::TakenPort silent;
  silent.listen(0);
  const sockaddr_in address = comm::loopback(silent.number());
  std::vector<comm::UniqueFd> callers;
  for (int i = 0; i < 16; ++i) {
    callers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    static_cast<void>(::connect(callers.back().get(), reinterpret_cast<const sockaddr*>(&address),
                                sizeof address));
  }
  const std::string port = std::to_string(silent.number());
  const Stage stage{.told_address = [&](int rank, const std::string& own) {
    return rank == 0 ? "127.0.0.1 " + port + " token" : own;
  }};
  EXPECT_THAT(
      failure_of_two<TimeoutError>(std::chrono::seconds(4), [&](std::size_t) { return stage; }),
      AllOf(HasSubstr("tcp: cannot connect to rank 0 of 2 at 127.0.0.1:" + port +
                      ": no answer within "),
            HasSubstr("has too many callers; let the hosts connect to each other at any port")));
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

// A number that travels with the calls has the same bits as one that travels over links.
TEST(TcpLinks, DoNotChangeTheBitsOfANumber) {
  run_world({.size = 5, .path = Path::kTcp}, [](Communicator& world) {
    const auto bits = [&](Dtype dtype, float divisor) {
      std::vector<std::uint64_t> memory(8);
      const TensorView data{memory.data(), 5, dtype};
      fill(data, [&](std::int64_t i) {
        return 1.0 / (3.0 + static_cast<double>(i) + 7.0 * world.rank());
      });
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

// Sets the soft limit of this process's descriptors while it lives.
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
      if (const auto error = caught<Error>([&] { sum(r); })) messages[r] = error->what();
    });
  }
  EXPECT_THAT(messages[0], AllOf(HasSubstr("links to 5 peers"), HasSubstr("ulimit -n"),
                                 HasSubstr("engine 'mpi'"), HasSubstr("of 6)")));
  EXPECT_THAT(messages, testing::Each(messages[0]));
  run_each(kSize, sum);
}

// Two ranks with a link between them.
class TcpLink : public testing::Test {
 protected:
  void SetUp() override {
    const auto before = open_sockets();
    run_each(2, [this](std::size_t r) { all_reduce(r); });
    sockets_ = open_sockets();
    std::erase_if(sockets_, [&](int socket) { return std::ranges::count(before, socket) > 0; });
  }
  void all_reduce(std::size_t rank) {
    std::vector<float> data(1'000);
    worlds_[rank].all_reduce({.data = {data.data(), 1'000}, .bucket = 2});
  }
  std::vector<Communicator> worlds_ = make_worlds({.size = 2, .path = Path::kTcp});
  std::vector<int> sockets_;  // of the link
};

TEST_F(TcpLink, BrokenWhileThePeersLiveIsAnErrorThatNamesARank) {
  reset(sockets_.at(0));
  std::vector<std::string> messages(2);
  run_each(2, [&](std::size_t r) {
    const auto error = caught<PeerLostError>([&] { all_reduce(r); });
    ASSERT_TRUE(error);
    messages[r] = error->what();
    EXPECT_EQ(error->ranks().size(), 1U);
  });
  EXPECT_THAT(messages[0], HasSubstr(" of 2 was lost ("));
  EXPECT_EQ(messages[0], messages[1]);
}

// Control finds dead peers; a stopped peer is alive.
TEST_F(TcpLink, JudgesNoPeerDead) {
  EXPECT_EQ(sockets_.size(), 2U);
  for (const int socket : sockets_) {
    for (const auto& [level, option] : {std::pair(SOL_SOCKET, SO_KEEPALIVE),
                                        std::pair<int, int>(IPPROTO_TCP, TCP_USER_TIMEOUT)}) {
      int value = 1;
      socklen_t size = sizeof value;
      EXPECT_EQ(::getsockopt(socket, level, option, &value, &size), 0);
      EXPECT_EQ(value, 0);
    }
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
