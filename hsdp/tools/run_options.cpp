#include "hsdp/tools/run_options.h"

#include <boost/program_options.hpp>
#include <cmath>
#include <iterator>
#include <sstream>

#include "hsdp/error.h"

namespace hsdp::tools {
namespace {

namespace po = boost::program_options;

constexpr int kMaxRanks = 4096;
constexpr double kMaxGraceSeconds = 1e6;

po::options_description described_options() {
  po::options_description options("Options");
  options.add_options()("ranks,n", po::value<int>()->value_name("N"),
                        "how many processes to start (required)")(
      "grace-s", po::value<double>()->default_value(15, "15")->value_name("SECONDS"),
      "how long the other ranks may go on after one failed, before SIGTERM; SIGKILL follows 5 s "
      "after that")("help,h", "print this text");
  return options;
}

// Where the program's command begins: after "--", or at the first word that is not an option.
std::size_t command_begin(const std::vector<std::string>& arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    if (word == "--" || word.size() < 2 || word[0] != '-') return i;
    if (word == "-n" || word == "--ranks" || word == "--grace-s") ++i;
  }
  return arguments.size();
}

}  // namespace

std::string run_help() {
  std::ostringstream text;
  text << "Usage: hsdp_run -n N [--grace-s SECONDS] [--] PROGRAM [ARGUMENT...]\n\n"
          "Starts N processes of PROGRAM on this host as ranks 0..N-1 of one job.\n\n"
       << described_options()
       << "\nEach rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, HSDP_JOB and\n"
          "HSDP_SECRET in its environment, MASTER_ADDR and MASTER_PORT for torch.distributed\n"
          "unless they are set already, and nothing on its standard input. Each line of its\n"
          "output is printed whole, after '[rank] '. SIGINT, SIGTERM, SIGHUP and SIGQUIT go to\n"
          "all ranks. When hsdp_run ends, in whatever way, so do all processes it started.\n\n"
          "Exit status: 0 when all ranks exited with 0; else that of the rank that failed first\n"
          "(128 + signal when a signal ended it); 2 for wrong usage; 126 or 127 when PROGRAM\n"
          "cannot be run or found.\n\n"
          "Example: hsdp_run -n 4 ./train --epochs 3\n";
  return text.str();
}

RunOptions parse_run_options(const std::vector<std::string>& arguments) {
  const std::size_t begin = command_begin(arguments);
  const auto split =
      arguments.begin() + static_cast<std::ptrdiff_t>(std::min(begin, arguments.size()));
  const std::vector<std::string> own(arguments.begin(), split);
  RunOptions options;
  po::variables_map values;
  try {
    const int style = po::command_line_style::unix_style &
                      ~static_cast<int>(po::command_line_style::allow_guessing);
    po::store(po::command_line_parser(own).options(described_options()).style(style).run(), values);
  } catch (const po::error& error) {
    throw UsageError(std::string("hsdp_run: ") + error.what());
  }
  options.help = values.count("help") != 0;
  if (options.help) return options;
  if (values.count("ranks") == 0) {
    throw UsageError({.where = "hsdp_run",
                      .expected = "a number of ranks",
                      .got = "none",
                      .remedy = "give it as -n N"});
  }
  options.rank_count = values["ranks"].as<int>();
  if (options.rank_count < 1 || options.rank_count > kMaxRanks) {
    throw UsageError({.where = "hsdp_run: -n",
                      .expected = "1 to " + std::to_string(kMaxRanks) + " ranks",
                      .got = std::to_string(options.rank_count)});
  }
  const double grace_s = values["grace-s"].as<double>();
  if (!std::isfinite(grace_s) || grace_s < 0 || grace_s > kMaxGraceSeconds) {
    throw UsageError({.where = "hsdp_run: --grace-s",
                      .expected = "0 to 1000000 seconds",
                      .got = std::to_string(grace_s)});
  }
  options.grace = std::chrono::milliseconds(static_cast<std::int64_t>(grace_s * 1000));
  options.command.assign(split, arguments.end());
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  }
  if (options.command.empty()) {
    throw UsageError({.where = "hsdp_run",
                      .expected = "a program to run",
                      .got = "none",
                      .remedy = "give it after -n N"});
  }
  return options;
}

}  // namespace hsdp::tools
