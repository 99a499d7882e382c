// The command as people and scripts use it: exit status, table, JSON, report.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/snapshot/written_snapshot.h"
#include "tests/support/command_outcome.h"

namespace hsdp {
namespace {

using namespace hsdp::testing;
using nlohmann::json;
using test::CommandOutcome;
using test::run_command;
using ::testing::HasSubstr;
using ::testing::Not;

class HsdpCheck : public ::testing::Test {
 protected:
  CommandOutcome run(const std::string& arguments, const std::string& redirect = {}) {
    return run_command("cd '" + folder_.path().string() + "' && COLUMNS=200 " HSDP_CHECK " " +
                       arguments + " " + redirect);
  }

  std::string last_line(const std::string& text) {
    const std::size_t end = text.find_last_not_of('\n');
    const std::size_t begin = text.rfind('\n', end);
    return text.substr(begin + 1, end - begin);
  }

  void write(const std::string& name, const std::vector<NamedGradient>& gradients,
             const SnapshotInfo& info = mesh_info(1, 1), Dtype wire = Dtype::kF32) {
    write_mesh(folder_ / name, gradients, info, wire);
  }

  TemporaryDirectory folder_;
};

TEST_F(HsdpCheck, SaysSameAcrossMeshes) {
  const auto gradients = some_gradients();
  write("one", gradients);
  write("flat", gradients, mesh_info(2, 2));
  write("rows", gradients, mesh_info(1, 4, "dim0"));
  write("replicas", gradients, mesh_info(4, 1));
  for (const char* other : {"flat", "rows", "replicas", "flat --bitwise", "rows --ulp 0",
                            "replicas --rtol 0 --atol 0"}) {
    const CommandOutcome outcome = run(std::string("one ") + other);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_EQ(last_line(outcome.output), "same: 7 parameters, 200,133 elements");
  }
}

TEST_F(HsdpCheck, SaysDifferentAndNamesParameterAndElement) {
  auto gradients = some_gradients();
  write("b", gradients, mesh_info(2, 2));
  gradients[0].data[7] = 9.5F;
  write("a", gradients, mesh_info(1, 4, "dim0"));
  const CommandOutcome outcome = run("a b");
  EXPECT_EQ(outcome.status, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("! layer.0.weight"));
  EXPECT_THAT(outcome.output, HasSubstr("a  a  (step 42, 1x4 dim0, 4 microbatches)"));
  EXPECT_THAT(last_line(outcome.output),
              HasSubstr("different: 1 of 7 parameters; worst 'layer.0.weight': relative L2"));
  EXPECT_THAT(last_line(outcome.output), HasSubstr("at [2, 1] 9.5 against "));
  EXPECT_EQ(run("a b --atol 100").status, 0);
  EXPECT_EQ(run("a b --bitwise").status, 1);
}

TEST_F(HsdpCheck, ValidatesOneSnapshot) {
  auto gradients = some_gradients();
  write("s", gradients, mesh_info(2, 2));
  const CommandOutcome sound = run("s");
  EXPECT_EQ(sound.status, 0);
  EXPECT_EQ(last_line(sound.output), "sound: 7 parameters, 2 replicas bitwise equal");
  gradients[0].data[14] = std::numeric_limits<float>::quiet_NaN();
  write("nan", gradients, mesh_info(1, 2));
  const CommandOutcome unsound = run("nan");
  EXPECT_EQ(unsound.status, 1);
  EXPECT_EQ(last_line(unsound.output),
            "unsound: 1 of 7 parameters; 'layer.0.weight': 1 NaN or infinite element, the first "
            "at [4, 2]");
}

TEST_F(HsdpCheck, ExitsWithTwoWhenItCannotTell) {
  write("s", some_gradients(), mesh_info(2, 2));
  write("t", {{"other", {1}, {1}}});
  std::filesystem::copy(folder_ / "s", folder_ / "incomplete");
  std::filesystem::remove(folder_ / "incomplete/rank_00002.h5");
  std::filesystem::copy(folder_ / "s", folder_ / "flipped");
  std::vector<char> bytes = file_bytes(folder_ / "flipped/rank_00003.h5");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(folder_ / "flipped/rank_00003.h5", bytes);
  write("empty", {});
  write("alone.h5", some_gradients());
  std::filesystem::copy(folder_ / "alone.h5", folder_ / "other.h5");
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "expected one or two snapshots"},
      {"s s s", "expected one or two snapshots"},
      {"s s --frob", "unrecognised option"},
      {"s s --rtol x", "--rtol: expected a number"},
      {"s s --rtol -1", "--rtol"},
      {"s s --rtol nan", "--rtol"},
      {"s s --rtol", "--rtol"},
      {"s s --bit", "--bit"},
      {"s --bitwise", "expected two snapshots, got one"},
      {"s s --bitwise --ulp 1", "choose one"},
      {"s absent", "cannot open"},
      {"s t", "the parameters differ"},
      {"incomplete s", "missing 1 (rank 2)"},
      {"flipped s", "damaged"},
      {"s flipped", "damaged"},
      {"flipped", "damaged"},
      {"s s --html absent/report.html", "cannot write the report"},
      {"s s --html s/rank_00000.h5", "--html: expected a file apart from the snapshots"},
      {"s --html ./s", "--html: expected a file apart from the snapshots"},
      {"alone.h5 --html other.h5", "--html: expected a file for the report, got the snapshot"},
      {"empty empty", "nothing to compare: "},
      {"s s --all >/dev/full", "standard output"}};
  for (const auto& [arguments, message] : cases) {
    const CommandOutcome outcome = run(arguments);
    EXPECT_EQ(outcome.status, 2) << arguments << ": " << outcome.output;
    if (arguments.find("/dev/full") != std::string::npos) continue;
    EXPECT_THAT(outcome.output, HasSubstr("hsdp_check: cannot tell: ")) << arguments;
    EXPECT_THAT(outcome.output, HasSubstr(message)) << arguments;
  }
  EXPECT_EQ(file_bytes(folder_ / "other.h5"), file_bytes(folder_ / "alone.h5"));
}

TEST_F(HsdpCheck, CountsMismatchesInWords) {
  auto gradients = some_gradients();
  write("b", gradients);
  for (const std::size_t i : {1U, 2U}) {
    gradients[0].data[i] = std::numeric_limits<float>::infinity();
  }
  write("a", gradients);
  EXPECT_THAT(last_line(run("a b").output), HasSubstr("2 NaN or infinity mismatches"));
}

TEST_F(HsdpCheck, AnErrorLeavesNoEarlierReport) {
  write("s", some_gradients());
  EXPECT_EQ(run("s --html report.html").status, 0);
  EXPECT_EQ(run("absent --html report.html").status, 2);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "report.html"));
  const std::string other = "<!doctype html><title>mine</title>";
  write_bytes(folder_ / "report.html", {other.begin(), other.end()});
  EXPECT_EQ(run("absent --html report.html").status, 2);
  EXPECT_EQ(file_bytes(folder_ / "report.html").size(), other.size());
}

TEST_F(HsdpCheck, HelpsAndTellsItsVersion) {
  const CommandOutcome help = run("--help");
  EXPECT_EQ(help.status, 0);
  for (const char* option :
       {"--rtol", "--atol", "--ulp", "--bitwise", "--json", "--html", "--all"}) {
    EXPECT_THAT(help.output, HasSubstr(option));
  }
  EXPECT_THAT(run("--version").output, ::testing::StartsWith("hsdp_check 0."));
}

TEST_F(HsdpCheck, PrintsJsonThatScriptsCanRelyOn) {
  auto gradients = some_gradients();
  write("b", gradients, mesh_info(2, 2), Dtype::kBf16);
  gradients[6].data[500] = std::numeric_limits<float>::infinity();
  write("a", gradients, mesh_info(1, 4, "dim0"));
  const CommandOutcome outcome = run("a b --json", "2>/dev/null");
  EXPECT_EQ(outcome.status, 1);
  const json found = json::parse(outcome.output);
  EXPECT_EQ(found["schema"], 1);
  EXPECT_EQ(found["mode"], "compare");
  EXPECT_EQ(found["verdict"], "different");
  EXPECT_EQ(found["exit_status"], 1);
  EXPECT_EQ(found["criterion"]["kind"], "relative");
  EXPECT_EQ(found["a"]["layout"], "dim0");
  EXPECT_EQ(found["b"]["replicate_size"], 2);
  EXPECT_EQ(found["element_count"], 200133);
  EXPECT_EQ(found["different_count"], 1);
  ASSERT_EQ(found["parameters"].size(), 7U);
  const json& worst = found["parameters"][0];
  EXPECT_EQ(worst["name"], "big");
  EXPECT_EQ(worst["verdict"], "different");
  EXPECT_EQ(worst["coarsest_dtype"], "bf16");
  EXPECT_EQ(worst["nonfinite_a"], 1);
  EXPECT_EQ(worst["nonfinite_mismatches"], 1);
  EXPECT_EQ(worst["worst"]["index"], 500);
  EXPECT_EQ(worst["worst"]["position"], (json{1, 1}));
  EXPECT_EQ(worst["worst"]["a"], "inf");
  EXPECT_FALSE(worst.contains("heat"));
  const json valid = json::parse(run("b --json", "2>/dev/null").output);
  EXPECT_EQ(valid["mode"], "validate");
  EXPECT_EQ(valid["verdict"], "sound");
  EXPECT_EQ(valid["copy_count"], 2);
  const json error = json::parse(run("absent --json", "2>/dev/null").output);
  EXPECT_EQ(error["verdict"], "cannot tell");
  EXPECT_EQ(error["exit_status"], 2);
  EXPECT_THAT(error["summary"].get<std::string>(), HasSubstr("absent"));
  write("empty", {});
  for (const char* wrong :
       {"--json --rtol x a b", "--frob a b --json", "--json", "empty empty --json"}) {
    const json usage = json::parse(run(wrong, "2>/dev/null").output);
    EXPECT_EQ(usage["mode"], "error") << wrong;
    EXPECT_EQ(usage["exit_status"], 2) << wrong;
  }
}

TEST_F(HsdpCheck, WritesAReportThatStandsAlone) {
  auto gradients = some_gradients();
  gradients[0].name = "</script><script>alert(1)</script><!--";
  write("b", gradients);
  gradients[0].data[3] += 1;
  write("a", gradients);
  EXPECT_EQ(run("a b --html report.html").status, 1);
  const std::vector<char> bytes = file_bytes(folder_ / "report.html");
  const std::string page(bytes.begin(), bytes.end());
  EXPECT_THAT(page, ::testing::StartsWith("<!doctype html>"));
  EXPECT_THAT(page, Not(HasSubstr("alert(1)</script>")));
  EXPECT_THAT(page, Not(HasSubstr("@FINDINGS@")));
  for (const char* outside : {"src=", "href=", "url(", "@import"}) {
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  }
  const std::string opening = "id=\"findings\">";
  const std::size_t begin = page.find(opening) + opening.size();
  const json found = json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  EXPECT_EQ(found["parameters"][0]["name"], gradients[0].name);
  EXPECT_EQ(found["parameters"][0]["heat"]["max"].size(), 15U);
  EXPECT_EQ(run("a --html valid.html").status, 0);
  EXPECT_FALSE(file_bytes(folder_ / "valid.html").empty());
}

TEST_F(HsdpCheck, KeepsControlCharactersFromTheTerminal) {
  auto gradients = some_gradients();
  gradients[0].name = "a\x1b[2Jb";
  write("s", gradients);
  const CommandOutcome outcome = run("s s");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.output, Not(HasSubstr("\x1b")));
  EXPECT_THAT(outcome.output, HasSubstr("a?[2Jb"));
}

TEST_F(HsdpCheck, BearsPathsThatAreNotUtf8) {
  write("s\xff", some_gradients());
  EXPECT_EQ(run("s\xff --json --html r.html", "2>/dev/null").status, 0);
}

TEST_F(HsdpCheck, ShowsTheWorstRowsUnlessAskedForAll) {
  std::vector<NamedGradient> gradients;
  for (int i = 0; i < 60; ++i) {
    std::string name = "p";
    gradients.push_back({name.append(std::to_string(i)), {1}, {static_cast<float>(i)}});
  }
  write("s", gradients);
  EXPECT_THAT(run("s s").output, HasSubstr("... 20 more: --all"));
  EXPECT_THAT(run("s s --all").output, HasSubstr("p59"));
}

}  // namespace
}  // namespace hsdp
