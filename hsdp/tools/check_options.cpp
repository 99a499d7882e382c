#include "hsdp/tools/check_options.h"

#include <boost/program_options.hpp>
#include <charconv>
#include <cmath>
#include <sstream>
#include <vector>

#include "hsdp/error.h"

namespace hsdp {
namespace {

namespace po = boost::program_options;

constexpr const char* kUsage =
    R"(usage: hsdp_check A B [options]   are two snapshots the same gradients?
       hsdp_check A [options]     is a snapshot whole and sound?
       hsdp_check --digest A B    are two runs' results the same, step by step?
       hsdp_check --flight DIR    which rank did a job wait for?

A and B are snapshot directories or single files. Mesh shapes, layouts and
dtypes of A and B may differ. By default a parameter is the same when relative
L2 and max|a-b| / max|b| are at most 2^-20 (f32 wire), 2^-9 (f16), 2^-6 (bf16).

With --digest, A and B are folders that save_digest has written, in runs of one
mesh and one model.

exit status: 0 same, sound or none, 1 different, unsound or some, 2 cannot tell

)";

po::options_description visible_options() {
  po::options_description options("options", 78, 40);
  options.add_options()                                                                      //
      ("rtol", po::value<std::string>()->value_name("X"), "same: |a-b| <= atol + rtol |b|")  //
      ("atol", po::value<std::string>()->value_name("X"), "see --rtol")                      //
      ("ulp", po::value<std::string>()->value_name("N"),
       "same: at most N units in the last place of the coarser dtype")    //
      ("bitwise", po::bool_switch(), "same: equal bits")                  //
      ("digest", po::bool_switch(), "compare two runs by their digests")  //
      ("json", po::bool_switch(), "print JSON instead of the table")      //
      ("html", po::value<std::string>()->value_name("FILE"),
       "write a report to look at, one file")                                  //
      ("all", po::bool_switch(), "print every parameter, not the worst only")  //
      ("flight", po::value<std::string>()->value_name("DIR"),
       "read the flight records of a job (HSDP_FLIGHT_DIR)")  //
      ("help,h", po::bool_switch(), "print this text")        //
      ("version", po::bool_switch(), "print the version");
  return options;
}

std::optional<double> get_number(const po::variables_map& values, const char* option) {
  if (values.count(option) == 0) return std::nullopt;
  const auto& text = values[option].as<std::string>();
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(number) ||
      number < 0) {
    throw UsageError({.where = std::string("--") + option,
                      .expected = "a number of at least 0",
                      .got = "'" + text + "'"});
  }
  return number;
}

po::variables_map parse(int argc, const char* const* argv) {
  po::options_description all = visible_options();
  all.add_options()("snapshot", po::value<std::vector<std::string>>());
  po::positional_options_description positions;
  positions.add("snapshot", -1);
  po::variables_map values;
  try {
    // No abbreviations: if --bit meant --bitwise, a later option could change what a script does.
    const auto style =
        po::command_line_style::default_style & ~po::command_line_style::allow_guessing;
    po::store(
        po::command_line_parser(argc, argv).options(all).positional(positions).style(style).run(),
        values);
    po::notify(values);
  } catch (const po::error& error) {
    throw UsageError(std::string(error.what()) + "; see hsdp_check --help");
  }
  return values;
}

}  // namespace

CheckOptions parse_check_options(int argc, const char* const* argv) {
  const po::variables_map values = parse(argc, argv);
  CheckOptions options;
  if (values["help"].as<bool>()) {
    std::ostringstream text;
    text << kUsage << visible_options();
    options.message = text.str();
    return options;
  }
  if (values["version"].as<bool>()) {
    options.message = "hsdp_check " HSDP_VERSION "\n";
    return options;
  }
  if (values.count("flight") != 0) {
    if (argc != 3 && argc != 2) {
      throw UsageError({.where = "--flight",
                        .expected = "a folder and nothing else",
                        .got = std::to_string(argc - 1) + " arguments"});
    }
    options.flight = values["flight"].as<std::string>();
    return options;
  }
  std::vector<std::string> paths;
  if (values.count("snapshot") != 0) paths = values["snapshot"].as<std::vector<std::string>>();
  if (paths.empty() || paths.size() > 2) {
    throw UsageError("expected one or two snapshots, got " + std::to_string(paths.size()) +
                     "; see hsdp_check --help");
  }
  options.a = paths[0];
  if (paths.size() == 2) options.b = paths[1];
  options.compare.rtol = get_number(values, "rtol");
  options.compare.atol = get_number(values, "atol");
  options.compare.ulp = get_number(values, "ulp");
  options.compare.bitwise = values["bitwise"].as<bool>();
  options.digests = values["digest"].as<bool>();
  options.json = values["json"].as<bool>();
  options.all_rows = values["all"].as<bool>();
  if (values.count("html") != 0) options.html = values["html"].as<std::string>();
  options.compare.detail = options.html.has_value();
  const bool limits = options.compare.rtol || options.compare.atol || options.compare.ulp ||
                      options.compare.bitwise;
  if (limits && !options.b)
    throw UsageError({.where = "--rtol, --atol, --ulp and --bitwise",
                      .expected = "two snapshots",
                      .got = "one",
                      .remedy = "give both, or leave them out"});
  if (options.digests && (!options.b || limits || options.html || options.all_rows)) {
    throw UsageError({.where = "--digest",
                      .expected = "two folders of digests, and no option but --json",
                      .got = options.b ? "others" : "one"});
  }
  return options;
}

}  // namespace hsdp
