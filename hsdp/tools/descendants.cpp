#include "hsdp/tools/descendants.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/rendezvous/read_file.h"

namespace hsdp::tools {
namespace {

struct ProcessFacts {
  pid_t pid = 0;
  pid_t parent = 0;
  bool is_zombie = false;
};

std::vector<ProcessFacts> all_processes() {
  std::vector<ProcessFacts> all;
  std::error_code error;
  std::filesystem::directory_iterator entry("/proc", error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c); })) {
      continue;
    }
    const std::string stat = comm::read_file(entry->path() / "stat").value_or("");
    // "pid (command) state parent ...": the command may contain any characters.
    const auto command_end = stat.rfind(')');
    if (command_end == std::string::npos) continue;
    std::istringstream fields(stat.substr(command_end + 1));
    char state = '?';
    ProcessFacts facts;
    fields >> state >> facts.parent;
    facts.pid = static_cast<pid_t>(std::stol(name));
    facts.is_zombie = state == 'Z' || state == 'X';
    all.push_back(facts);
  }
  return all;
}

std::vector<pid_t> living_descendants() {
  const std::vector<ProcessFacts> all = all_processes();
  std::set<pid_t> family{::getpid()};
  for (std::size_t before = 0; before != family.size();) {
    before = family.size();
    for (const ProcessFacts& facts : all) {
      if (family.contains(facts.parent)) family.insert(facts.pid);
    }
  }
  std::vector<pid_t> living;
  for (const ProcessFacts& facts : all) {
    if (facts.pid != ::getpid() && family.contains(facts.pid) && !facts.is_zombie) {
      living.push_back(facts.pid);
    }
  }
  return living;
}

// Reaps the children that have ended; returns whether any are left.
bool has_children_left() {
  pid_t ended = 0;
  do {
    ended = ::waitpid(-1, nullptr, WNOHANG);
  } while (ended > 0);
  return ended == 0;
}

}  // namespace

void adopt_orphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

void kill_descendants() {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  // Orphans become children of this process: without children, there are no descendants.
  while (has_children_left() && std::chrono::steady_clock::now() < end) {
    for (const pid_t pid : living_descendants()) ::kill(pid, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace hsdp::tools
