// Prints what the control plane sends and how long a word takes, by the number of ranks.
// Usage: simulate_control [--hosts N] [--ranks-per-host N] [--words N] [--seed N] [--fan-out N]
//        [--kill RANK...]
// Exit status: 0, 1 when a promise is broken, 2 on bad usage.
#include <algorithm>
#include <boost/program_options.hpp>
#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "tests/simulate/control_simulation.h"

namespace hsdp::simulate {
namespace {

constexpr int kBarWidth = 40;

struct Row {
  int hosts = 0;
  int ranks = 0;
  int links = 0;        // of rank 0
  double messages = 0;  // of rank 0 per word, both ways
  double most_out = 0;  // bytes per word on the busiest link
  double most_in = 0;
  double all_out = 0;  // bytes of rank 0
  double all_in = 0;
  double ms = 0;  // of the median word
};

Row measured(const Options& options, const Outcome& outcome) {
  Row row{.hosts = options.hosts, .ranks = options.size()};
  const auto words = static_cast<double>(options.words);
  for (const auto& [rank, link] : outcome.links) {
    row.most_out = std::max(row.most_out, static_cast<double>(link.bytes_out) / words);
    row.most_in = std::max(row.most_in, static_cast<double>(link.bytes_in) / words);
    if (link.parent != 0) continue;
    ++row.links;
    row.messages += static_cast<double>(link.messages_out + link.messages_in) / words;
    row.all_out += static_cast<double>(link.bytes_out) / words;
    row.all_in += static_cast<double>(link.bytes_in) / words;
  }
  std::vector<std::int64_t> times = outcome.word_us;
  std::ranges::sort(times);
  row.ms = times.empty() ? 0 : static_cast<double>(times[times.size() / 2]) / 1e3;
  return row;
}

void print_table(const std::vector<Row>& rows) {
  std::printf("one status word of all ranks; bytes of links are those of the busiest one\n\n");
  std::printf("%6s %6s %6s %10s %10s %10s %13s %13s %8s\n", "hosts", "ranks", "links", "messages",
              "down B", "up B", "rank 0 out B", "rank 0 in B", "ms");
  for (const Row& row : rows) {
    std::printf("%6d %6d %6d %10.0f %10.0f %10.0f %13.0f %13.0f %8.2f\n", row.hosts, row.ranks,
                row.links, row.messages, row.most_out, row.most_in, row.all_out, row.all_in,
                row.ms);
  }
}

// Prints the traffic of the last row by level of the tree.
void print_levels(const Options& options, const Outcome& outcome) {
  struct Level {
    int links = 0;
    double messages = 0;
    double bytes = 0;
  };
  std::map<int, Level> levels;
  for (const auto& [rank, link] : outcome.links) {
    Level& level = levels[link.depth];
    ++level.links;
    level.messages += static_cast<double>(link.messages_out + link.messages_in);
    level.bytes += static_cast<double>(link.bytes_out + link.bytes_in);
  }
  std::printf("\n%d ranks by level: 1 speaks to rank 0, 2 to a rank of level 1\n\n",
              options.size());
  std::printf("%6s %6s %10s %12s\n", "level", "links", "messages", "bytes");
  for (const auto& [depth, level] : levels) {
    std::printf("%6d %6d %10.0f %12.0f\n", depth, level.links, level.messages / options.words,
                level.bytes / options.words);
  }
}

void print_bars(const char* title, const std::vector<Row>& rows, double Row::*value) {
  double most = 0;
  for (const Row& row : rows) most = std::max(most, row.*value);
  std::printf("\n%s\n", title);
  for (const Row& row : rows) {
    const int width = most > 0 ? static_cast<int>(kBarWidth * row.*value / most + 0.5) : 0;
    std::printf("%6d |%-*s %.6g\n", row.ranks, kBarWidth,
                std::string(static_cast<std::size_t>(width), '#').c_str(), row.*value);
  }
}

// 1, 8, 64 ... hosts, and at last `most`.
std::vector<int> host_counts(int most) {
  std::vector<int> counts;
  for (int hosts = 1; hosts < most; hosts *= 8) counts.push_back(hosts);
  counts.push_back(most);
  return counts;
}

int run(Options options) {
  std::vector<Row> rows;
  Outcome last_outcome;
  bool kept = true;
  const int most = options.hosts;
  for (const int hosts : options.killed.empty() ? host_counts(most) : std::vector<int>{most}) {
    options.hosts = hosts;
    if (!options.killed.empty()) {
      Options alive = options;
      alive.killed.clear();
      options.kill_at = ControlSimulation(alive).run().events / 2;
    }
    const Outcome outcome = ControlSimulation(options).run();
    for (const std::string& broken : outcome.broken_promises) std::printf("%s\n", broken.c_str());
    kept = kept && outcome.broken_promises.empty();
    rows.push_back(measured(options, outcome));
    if (options.killed.empty()) {
      last_outcome = outcome;
      continue;
    }
    std::int64_t last = 0;
    std::string message;
    for (const auto& end : outcome.ends) {
      if (end && end->at_us >= last) last = end->at_us;
      if (end) message = end->message;
    }
    std::printf("every survivor knows after %.2f ms: %s\n",
                static_cast<double>(last - outcome.killed_us) / 1e3, message.c_str());
  }
  if (options.killed.empty()) {
    print_table(rows);
    print_levels(options, last_outcome);
    print_bars("ms a word", rows, &Row::ms);
    print_bars("bytes that rank 0 sends a word", rows, &Row::all_out);
  }
  return kept ? 0 : 1;
}

}  // namespace
}  // namespace hsdp::simulate

int main(int count, char** arguments) {
  namespace po = boost::program_options;
  hsdp::simulate::Options options;
  po::options_description known("simulate_control: the control plane in virtual time");
  const auto number = [](int* to) { return po::value<int>(to)->default_value(*to); };
  known.add_options()("help", "show this and exit")("hosts", number(&options.hosts),
                                                    "hosts, rank 0 on the first")(
      "ranks-per-host", number(&options.ranks_per_host), "processes on each")(
      "words", number(&options.words), "words that all ranks say one after the other")(
      "seed", po::value<std::uint64_t>(&options.seed)->default_value(options.seed),
      "of the order in which messages come")(
      "fan-out", number(&options.fan_out),
      "ranks that speak to rank 0 before there is a tree, and ranks of a host through one")(
      "kill", po::value<std::vector<int>>(&options.killed)->multitoken(),
      "ranks whose processes end amid the words");
  try {
    po::variables_map given;
    po::store(po::parse_command_line(count, arguments, known), given);
    po::notify(given);
    if (given.contains("help")) {
      std::printf("usage: simulate_control [OPTION...]\n");
      for (const auto& option : known.options()) {
        std::printf("  --%-16s %s\n", option->long_name().c_str(), option->description().c_str());
      }
      return 0;
    }
    constexpr int kMost = 1 << 12;
    const bool fits = options.hosts > 0 && options.ranks_per_host > 0 && options.words > 0 &&
                      options.hosts <= kMost / options.ranks_per_host && options.size() > 1;
    if (!fits) {
      throw po::error("expected 2 to 4096 ranks and at least one word, got " +
                      std::to_string(options.hosts) + " hosts with " +
                      std::to_string(options.ranks_per_host) + " ranks and " +
                      std::to_string(options.words) + " words");
    }
    if (options.fan_out < 1) {
      throw po::error("--fan-out: expected at least 1, got " + std::to_string(options.fan_out));
    }
    for (const int rank : options.killed) {
      if (rank >= 0 && rank < options.size()) continue;
      throw po::error("--kill: expected a rank below " + std::to_string(options.size()) + ", got " +
                      std::to_string(rank));
    }
    return hsdp::simulate::run(options);
  } catch (const po::error& error) {
    std::fprintf(stderr, "simulate_control: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "simulate_control: %s\n", error.what());
    return 1;
  }
}
