#include "hsdp/tools/rank_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::tools {
namespace {

struct Pipe {
  comm::UniqueFd read;
  comm::UniqueFd write;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(std::string("hsdp_run: cannot make a pipe: ") + std::strerror(errno));
  }
  return {comm::UniqueFd(ends[0]), comm::UniqueFd(ends[1])};
}

void set_variable(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }

void set_environment(const RankPlan& plan) {
  set_variable("RANK", std::to_string(plan.rank));
  set_variable("WORLD_SIZE", std::to_string(plan.size));
  set_variable("LOCAL_RANK", std::to_string(plan.rank));
  set_variable("LOCAL_WORLD_SIZE", std::to_string(plan.size));
  set_variable("HSDP_JOB", plan.job);
  set_variable("HSDP_SECRET", plan.secret);
  // An outer launcher's settings do not apply to this job.
  for (const char* name :
       {"HSDP_SECRET_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}) {
    ::unsetenv(name);
  }
}

void reset_signals() {
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::signal(SIGPIPE, SIG_DFL);
}

[[noreturn]] void become_rank(const RankPlan& plan, pid_t parent, const Pipe& output,
                              const Pipe& errors, int exec_report) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  set_environment(plan);
  const int nothing = ::open("/dev/null", O_RDONLY);
  ::dup2(nothing, STDIN_FILENO);
  if (nothing > STDERR_FILENO) ::close(nothing);
  ::dup2(output.write.get(), STDOUT_FILENO);
  ::dup2(errors.write.get(), STDERR_FILENO);
  std::vector<char*> words;
  for (const std::string& word : plan.command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  reset_signals();
  ::execvp(words[0], words.data());
  const int error = errno;
  static_cast<void>(::write(exec_report, &error, sizeof error) == sizeof error);
  ::_exit(127);
}

}  // namespace

RankProcess start_rank(const RankPlan& plan) {
  Pipe output = make_pipe();
  Pipe errors = make_pipe();
  Pipe report = make_pipe();
  const pid_t parent = ::getpid();
  RankProcess process;
  process.pid = ::fork();
  if (process.pid < 0) {
    throw Error(std::string("hsdp_run: cannot fork: ") + std::strerror(errno));
  }
  if (process.pid == 0) become_rank(plan, parent, output, errors, report.write.get());
  ::setpgid(process.pid, process.pid);
  report.write.reset();
  // A successful exec closes the pipe; otherwise it carries the errno.
  if (::read(report.read.get(), &process.exec_error, sizeof process.exec_error) !=
      sizeof process.exec_error) {
    process.exec_error = 0;
  }
  ::fcntl(output.read.get(), F_SETFL, O_NONBLOCK);
  ::fcntl(errors.read.get(), F_SETFL, O_NONBLOCK);
  process.output = std::move(output.read);
  process.errors = std::move(errors.read);
  return process;
}

}  // namespace hsdp::tools
