#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>

#include "examples/demo/claims.h"
#include "examples/demo/number_text.h"

namespace examples {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kVictim = 2;

// What follows `mark` in the line; nothing if it is missing.
std::optional<std::string> text_after(const std::string& line, const std::string& mark) {
  const std::size_t position = line.find(mark);
  if (position == std::string::npos) {
    return std::nullopt;
  }
  return line.substr(position + mark.size());
}

// How the training reacted to the loss of a rank.
struct Aftermath {
  std::map<int, std::string> messages;  // from ranks that raised and named the victim
  double last_message_s = 0;            // after the kill
  int status = 0;
};

Clock::time_point kill_in_mid_training(Job& job) {
  pid_t victim = 0;
  while (const std::optional<std::string> line = job.next_line()) {
    const auto pid = text_after(*line, "rank " + std::to_string(kVictim) + " of 4: pid ");
    if (pid) {
      victim = static_cast<pid_t>(std::stol(*pid));
    }
    if (victim > 0 && text_after(*line, "step 25: ")) {
      kill(victim, SIGKILL);
      return Clock::now();
    }
  }
  throw std::runtime_error("training ended before it was killed; it printed:\n" +
                           job.wait().output);
}

Aftermath watch(Job& job, Clock::time_point killed) {
  Aftermath aftermath;
  while (const std::optional<std::string> line = job.next_line()) {
    for (int rank = 0; rank < 4; ++rank) {
      const auto message = text_after(*line, "rank " + std::to_string(rank) + " raised: ");
      if (message && message->find("rank " + std::to_string(kVictim)) != std::string::npos) {
        aftermath.messages.emplace(rank, *message);
        aftermath.last_message_s = std::chrono::duration<double>(Clock::now() - killed).count();
      }
    }
  }
  aftermath.status = job.wait().status;
  return aftermath;
}

}  // namespace

Claim kill_claim(const DemoOptions& options) {
  DemoOptions endless = options;
  endless.step_count = 1'000'000;
  Job job(mesh_command(endless, {.name = "killed"}), std::chrono::seconds(60));
  const Clock::time_point killed = kill_in_mid_training(job);
  const Aftermath aftermath = watch(job, killed);

  Claim claim{.claim = "kill -9 of rank " + std::to_string(kVictim)};
  std::string ranks;
  for (const auto& [rank, message] : aftermath.messages) {
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  claim.number = aftermath.messages.empty()
                     ? "no rank named it"
                     : "ranks " + ranks + " raised within " +
                           fixed_text(aftermath.last_message_s, 2) + " s and named it";
  claim.holds = aftermath.messages.size() == 3 && aftermath.status != 0 &&
                aftermath.last_message_s < options.kill_limit_s;
  if (!aftermath.messages.empty()) {
    const auto& [rank, message] = *aftermath.messages.begin();
    claim.details.push_back("rank " + std::to_string(rank) + ": " + message);
  }
  return claim;
}

}  // namespace examples
