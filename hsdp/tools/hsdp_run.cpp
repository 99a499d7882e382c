// Starts the ranks of a job on this host; see --help.
//
// It runs as two processes: the one that the user sees, and its child, which starts the ranks. Both
// adopt orphans and kill their remaining descendants, so that even a kill -9 of either leaves no
// process behind.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/comm/rendezvous/job_directory.h"
#include "hsdp/error.h"
#include "hsdp/tools/descendants.h"
#include "hsdp/tools/master_address.h"
#include "hsdp/tools/rank_launcher.h"
#include "hsdp/tools/run_options.h"

namespace hsdp::tools {
namespace {

constexpr int kUsage = 2;

std::atomic<pid_t> launcher{0};

// Otherwise the next file opened would become a standard stream.
void open_closed_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // Gets the lowest free number, which is `fd`.
    if (::fcntl(fd, F_GETFD) < 0) static_cast<void>(::open("/dev/null", O_RDWR));
  }
}

void pass_on(int number) {
  const pid_t pid = launcher.load();
  if (pid > 0) ::kill(pid, number);
}

int launch(const RunOptions& options, const std::string& job, pid_t parent) {
  ::setpgid(0, 0);  // the parent forwards the terminal's signals once
  adopt_orphans();
  offer_master_address();
  RankLauncher ranks(options, job, comm::random_secret());
  ::prctl(PR_SET_PDEATHSIG, RankLauncher::kOrphaned);
  if (::getppid() != parent) return 1;
  return ranks.run();
}

int await_launcher(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  launcher = 0;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Removes the rendezvous files of ranks that were killed during their rendezvous.
void sweep_rendezvous(const std::string& job) {
  comm::LaunchEnvironment environment;
  environment.job = job;
  for (const char* name : {"rank0", "leader0"}) {
    static_cast<void>(comm::sweep_job_socket(comm::job_socket_path(environment, name)));
  }
}

int run(const std::vector<std::string>& arguments) {
  const RunOptions options = parse_run_options(arguments);
  if (options.help) {
    std::cout << run_help();
    return 0;
  }
  const std::string job = "hsdp_run-" + comm::random_secret().substr(0, 16);
  adopt_orphans();
  const pid_t parent = ::getpid();
  sigset_t forwarded;
  sigset_t before;
  ::sigemptyset(&forwarded);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) ::sigaddset(&forwarded, number);
  ::sigprocmask(SIG_BLOCK, &forwarded, &before);
  const pid_t pid = ::fork();
  if (pid < 0) throw Error(std::string("hsdp_run: cannot fork: ") + std::strerror(errno));
  if (pid == 0) ::_exit(launch(options, job, parent));
  launcher = pid;
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) ::signal(number, pass_on);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  const int status = await_launcher(pid);
  kill_descendants();
  sweep_rendezvous(job);
  return status;
}

}  // namespace
}  // namespace hsdp::tools

int main(int argc, char** argv) {
  hsdp::tools::open_closed_streams();
  try {
    return hsdp::tools::run({argv + 1, argv + argc});
  } catch (const hsdp::UsageError& error) {
    std::cerr << error.what() << "\nTry 'hsdp_run --help'.\n";
    return hsdp::tools::kUsage;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
