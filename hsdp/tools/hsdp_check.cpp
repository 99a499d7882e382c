// hsdp_check: compares two snapshots, validates one, or reads flight records. docs/hsdp_check.md
// describes it.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "hsdp/compare.h"
#include "hsdp/error.h"
#include "hsdp/snapshot/snapshot_file.h"
#include "hsdp/tools/check_digests.h"
#include "hsdp/tools/check_facts.h"
#include "hsdp/tools/check_flight.h"
#include "hsdp/tools/check_html.h"
#include "hsdp/tools/check_json.h"
#include "hsdp/tools/check_options.h"
#include "hsdp/tools/check_text.h"
#include "hsdp/tools/progress_bar.h"
#include "hsdp/validate.h"

namespace hsdp {
namespace {

// Up to `count` bytes of a regular file; none of any other file, which might block.
std::string first_bytes(const std::filesystem::path& path, std::size_t count) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return {};
  std::ifstream file(path, std::ios::binary);
  std::string bytes(count, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(count));
  bytes.resize(static_cast<std::size_t>(file.gcount()));
  return bytes;
}

// A report must not overwrite its own snapshot, nor another snapshot given because FILE was
// forgotten.
void check_report_path(const CheckOptions& options) {
  if (!options.html) return;
  const auto report = std::filesystem::weakly_canonical(*options.html);
  for (const auto& snapshot : {std::optional(options.a), options.b}) {
    if (!snapshot) continue;
    const auto input = std::filesystem::weakly_canonical(*snapshot);
    if (report != input && report.parent_path() != input) continue;
    throw UsageError("--html: expected a file apart from the snapshots, got " +
                     options.html->string());
  }
  if (is_snapshot_file(*options.html)) {
    throw UsageError("--html: expected a file for the report, got the snapshot " +
                     options.html->string());
  }
}

// Removes an earlier run's report: it could be mistaken for this run's.
void remove_report(const std::filesystem::path& path) {
  constexpr std::size_t kTitleBytes = 4096;  // contains the title
  std::error_code error;
  if (is_html_report(first_bytes(path, kTitleBytes))) std::filesystem::remove(path, error);
}

void write_report(const std::filesystem::path& path, const nlohmann::ordered_json& findings) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << to_html(findings);
  file.close();
  if (!file) throw Error("cannot write the report " + path.string());
}

void print(const std::string& text) {
  std::cout << text << std::flush;
  if (!std::cout) throw Error("cannot write to standard output");
}

ExitStatus compare(const CheckOptions& options, const Snapshot& a) {
  const Snapshot b = Snapshot::open(*options.b);
  const Comparison comparison = [&] {
    ProgressBar bar;
    CompareOptions compare_options = options.compare;
    compare_options.progress = [&bar](double fraction) { bar.show(fraction); };
    return compare_snapshots(a, b, compare_options);
  }();
  if (comparison.parameters.empty()) {
    throw Error("nothing to compare: neither snapshot holds a parameter");
  }
  if (options.html) write_report(*options.html, to_json(comparison, true));
  TextStyle style = detect_text_style();
  style.all_rows = options.all_rows;
  print(options.json ? dump(to_json(comparison), 2) + "\n" : to_text(comparison, style));
  return exit_status(comparison.verdict);
}

ExitStatus validate(const CheckOptions& options, const Snapshot& a) {
  const Validation validation = [&] {
    ProgressBar bar;
    ValidateOptions validate_options;
    validate_options.progress = [&bar](double fraction) { bar.show(fraction); };
    return validate_snapshot(a, validate_options);
  }();
  if (options.html) write_report(*options.html, to_json(validation));
  TextStyle style = detect_text_style();
  style.all_rows = options.all_rows;
  print(options.json ? dump(to_json(validation), 2) + "\n" : to_text(validation, style));
  return validation.sound() ? ExitStatus::kSame : ExitStatus::kDifferent;
}

ExitStatus compare_runs(const CheckOptions& options) {
  const DigestComparison comparison = compare_digests(options.a, *options.b);
  print(options.json ? dump(to_json(comparison), 2) + "\n" : to_text(comparison));
  return comparison.different_count == 0 ? ExitStatus::kSame : ExitStatus::kDifferent;
}

ExitStatus check(int argc, const char* const* argv) {
  // Used until the command line is parsed, which may fail.
  bool json =
      std::any_of(argv, argv + argc, [](std::string_view word) { return word == "--json"; });
  std::optional<std::filesystem::path> report;
  try {
    const CheckOptions options = parse_check_options(argc, argv);
    json = options.json;
    if (!options.message.empty()) {
      print(options.message);
      return ExitStatus::kSame;
    }
    if (options.flight) {
      const FlightFindings findings = read_flight(*options.flight);
      print(findings.text);
      return findings.is_complete ? ExitStatus::kSame : ExitStatus::kDifferent;
    }
    if (options.digests) return compare_runs(options);
    check_report_path(options);
    report = options.html;
    const Snapshot a = Snapshot::open(options.a);
    return options.b ? compare(options, a) : validate(options, a);
  } catch (const std::exception& error) {
    if (report) remove_report(*report);
    if (json) std::cout << dump(error_to_json(error.what()), 2) << std::endl;
    std::cerr << "hsdp_check: cannot tell: " << error.what() << std::endl;
    return ExitStatus::kCannotTell;
  }
}

}  // namespace
}  // namespace hsdp

int main(int argc, char** argv) { return static_cast<int>(hsdp::check(argc, argv)); }
