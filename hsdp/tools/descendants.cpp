#include "hsdp/tools/descendants.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

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
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (!std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c); })) {
      continue;
    }
    const std::ifstream file(entry.path() / "stat");
    std::ostringstream text;
    text << file.rdbuf();  // nothing, and no exception, when the process has just gone
    const std::string stat = text.str();
    // "pid (command) state parent ...": the command may hold anything.
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

}  // namespace

void adopt_orphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

void kill_descendants() {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (std::chrono::steady_clock::now() < end) {
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    const std::vector<pid_t> living = living_descendants();
    if (living.empty()) return;
    for (const pid_t pid : living) ::kill(pid, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace hsdp::tools
