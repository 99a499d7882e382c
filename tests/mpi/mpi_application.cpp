// Programs that use MPI themselves or are started in unusual ways: mpi_application CASE. Every rank
// checks what it sees; status 0 if all is as expected.
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/engine.h"
#include "hsdp/comm/world.h"
#include "hsdp/error.h"

namespace {

using hsdp::Communicator;

int own_rank() { return hsdp::comm::detect_launch().rank; }

int expect(bool holds, const std::string& what) {
  std::printf("rank %d: %s: %s\n", own_rank(), holds ? "as expected" : "WRONG", what.c_str());
  std::fflush(stdout);
  return holds ? 0 : 1;
}

// The call throws an E whose message holds all of `parts`.
template <typename E>
int expect_error(const std::function<void()>& call, const std::vector<std::string>& parts) {
  try {
    call();
  } catch (const E& error) {
    bool holds = true;
    for (const std::string& part : parts) {
      holds = holds && std::string(error.what()).find(part) != std::string::npos;
    }
    return expect(holds, error.what());
  } catch (const std::exception& error) {
    return expect(false, std::string("another error: ") + error.what());
  }
  return expect(false, "no error");
}

Communicator connect(const std::string& engine = "mpi",
                     std::chrono::milliseconds timeout = std::chrono::milliseconds(20'000)) {
  return hsdp::connect_world({.engine = engine, .timeout = timeout});
}

int sum_ranks(Communicator& world) {
  std::vector<float> data(70'000, static_cast<float>(world.rank()));
  world.all_reduce(hsdp::TensorView{data.data(), std::ssize(data)});
  const auto sum = static_cast<float>(world.size() * (world.size() - 1) / 2);
  return expect(data.front() == sum && data.back() == sum, "the sum of the ranks");
}

int init(int level) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, level, &provided);
  return provided;
}

// The program's own MPI is used, and still belongs to the program afterwards.
int own_mpi() {
  init(MPI_THREAD_MULTIPLE);
  int status = 0;
  {
    Communicator world = connect();
    status = sum_ranks(world);
  }
  int is_finalized = 1;
  MPI_Finalized(&is_finalized);
  status += expect(is_finalized == 0, "MPI is left to the program");
  MPI_Finalize();
  return status;
}

int low_level() {
  init(MPI_THREAD_FUNNELED);
  const int status = expect_error<hsdp::UsageError>(
      [] { connect(); }, {"expected MPI_THREAD_MULTIPLE, got MPI_THREAD_FUNNELED",
                          "initialise MPI with MPI_Init_thread"});
  MPI_Finalize();
  return status;
}

// One rank alone cannot; the other ranks are told.
int low_level_of_one() {
  init(own_rank() == 1 ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE);
  const std::string part = "got MPI_THREAD_SERIALIZED";
  const int status = own_rank() == 1 ? expect_error<hsdp::UsageError>([] { connect(); }, {part})
                                     : expect_error<hsdp::MismatchError>(
                                           [] { connect(); }, {"rank 1 of 2 cannot", part});
  MPI_Finalize();
  return status;
}

int finalized_before() {
  init(MPI_THREAD_MULTIPLE);
  MPI_Finalize();
  return expect_error<hsdp::UsageError>([] { connect(); }, {"MPI was finalized"});
}

int finalized_early() {
  init(MPI_THREAD_MULTIPLE);
  Communicator world = connect();
  int status = sum_ranks(world);
  MPI_Finalize();
  // The first rank that notices ends the world. The other rank may learn of that first.
  std::string message;
  try {
    world.barrier();
  } catch (const hsdp::Error& error) {
    message = error.what();
  }
  status += expect(
      message.find("close the mesh and its reducers before MPI_Finalize") != std::string::npos,
      message);
  return status;
}

// A thread waits, in the middle of a call, for a rank that does not come.
int finalized_in_a_wait() {
  init(MPI_THREAD_MULTIPLE);
  Communicator world = connect();
  int status = sum_ranks(world);
  if (own_rank() == 1) {
    MPI_Finalize();
    return status;
  }
  std::thread waiting([&] {
    status += expect_error<hsdp::UsageError>([&] { world.barrier(); }, {"MPI was finalized"});
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  MPI_Finalize();
  waiting.join();
  return status;
}

// As if every rank were on a different host: MPI carries the address and the secret.
void pretend_several_hosts() {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}) {
    if (std::getenv(name) != nullptr) ::setenv(name, "1", 1);
  }
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"}) {
    if (std::getenv(name) != nullptr) ::setenv(name, "0", 1);
  }
}

int several_hosts() {
  pretend_several_hosts();
  int status = 0;
  for (const char* engine : {"mpi", "host"}) {
    Communicator world = connect(engine);
    status += sum_ranks(world);
    status += expect(world.engine()->control().secret().size() >= 32, "a secret of this job");
  }
  return status;
}

// The user gives the address; there is no secret.
int several_hosts_without_secret() {
  ::setenv("HSDP_ADDR", "127.0.0.1", 1);
  // The launcher is the ranks' parent: a port for each job.
  ::setenv("HSDP_PORT", std::to_string(20'000 + ::getppid() % 10'000).c_str(), 1);
  pretend_several_hosts();
  Communicator world = connect("host");
  return sum_ranks(world) +
         expect(world.engine()->control().address() == "127.0.0.1", "the user's address");
}

// A launcher that does not say which ranks share a host.
int unknown_hosts() {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                           "MPI_LOCALNRANKS", "MPI_LOCALRANKID"}) {
    ::unsetenv(name);
  }
  Communicator world = connect();
  bool shared = true;
  for (int peer = 0; peer < world.size(); ++peer) {
    shared = shared && world.engine()->control().shares_memory_with(peer);
  }
  return sum_ranks(world) + expect(shared, "MPI found out that all are on one host");
}

// Started by a launcher that is not MPI's, every process is a separate MPI job.
int foreign_launcher() {
  return expect_error<hsdp::UsageError>(
      [] { connect(); },
      {"of 2 in MPI_COMM_WORLD", "got rank 0 of 1", "start the program with the mpirun"});
}

// The host engine, to which MPI is no help then, names its own settings.
int several_hosts_foreign_launcher() {
  ::setenv("PMI_RANK", std::getenv("RANK"), 1);
  ::setenv("PMI_SIZE", std::getenv("WORLD_SIZE"), 1);
  ::setenv("MPI_LOCALNRANKS", "1", 1);
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    ::unsetenv(name);
  }
  return expect_error<hsdp::UsageError>([] { connect("host"); }, {"HSDP_ADDR and HSDP_PORT"});
}

// No rank waits inside MPI for one that never comes.
int different_engines() {
  const std::string engine = own_rank() == 0 ? "mpi" : "host";
  const int status = expect_error<hsdp::TimeoutError>(
      [&] { connect(engine, std::chrono::milliseconds(500)); }, {"of 2 did not"});
  int is_initialized = 1;
  MPI_Initialized(&is_initialized);
  return status + expect(is_initialized == 0, "MPI was not begun");
}

// A shell keeps its launcher from killing the others.
int killed() {
  Communicator world = connect();
  try {
    for (int round = 0;; ++round) {
      if (round == 50 && world.rank() == 1) ::raise(SIGKILL);
      sum_ranks(world);
    }
  } catch (const hsdp::PeerLostError& error) {
    return expect(error.ranks() == std::vector<int>{1}, std::string("lost: ") + error.what());
  }
}

// Rank 1 leaves one call out; MPI keeps what was sent to it for good.
int planned_calls_differ() {
  Communicator world = connect();
  const auto make = [&](int bucket) {
    std::vector<float> data(300, 1.0F);
    world.all_reduce({.data = {data.data(), 200 + bucket}, .bucket = bucket, .planned = true});
  };
  for (const int bucket : {0, 1, 2, 0, 1, 2}) make(bucket);
  return expect_error<hsdp::MismatchError>(
      [&] {
        make(0);
        if (world.rank() == 0) make(1);
        make(2);
        world.barrier();
      },
      {"all_reduce of 201 f32 of bucket 1 (rank 0)", "all_reduce of 202 f32 of bucket 2 (rank 1)"});
}

int alone() {
  Communicator world = connect();
  int is_initialized = 1;
  MPI_Initialized(&is_initialized);
  return expect(is_initialized == 0, "one rank needs no MPI") +
         expect(world.size() == 1 && world.engine_name() == "mpi", "a world of one");
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<int()>> cases{
      {"own_mpi", own_mpi},
      {"low_level", low_level},
      {"low_level_of_one", low_level_of_one},
      {"finalized_before", finalized_before},
      {"finalized_early", finalized_early},
      {"finalized_in_a_wait", finalized_in_a_wait},
      {"several_hosts", several_hosts},
      {"several_hosts_without_secret", several_hosts_without_secret},
      {"unknown_hosts", unknown_hosts},
      {"foreign_launcher", foreign_launcher},
      {"several_hosts_foreign_launcher", several_hosts_foreign_launcher},
      {"different_engines", different_engines},
      {"killed", killed},
      {"planned_calls_differ", planned_calls_differ},
      {"alone", alone}};
  const auto chosen = cases.find(argc > 1 ? argv[1] : "");
  if (chosen == cases.end()) {
    std::fprintf(stderr, "usage: mpi_application CASE\n");
    return 2;
  }
  return chosen->second() == 0 ? 0 : 1;
}
