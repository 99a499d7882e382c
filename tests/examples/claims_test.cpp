// Every claim can fail.
#include "examples/demo/claims.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "examples/demo/loss_plot.h"

namespace examples {
namespace {

using testing::HasSubstr;
using testing::Not;

TrainingResult good_result() {
  return {.losses = {2.3, 1.0, 0.5},
          .test_accuracy = 0.9,
          .hash = "00000000000000aa",
          .seconds = 1,
          .bucket_count = 5,
          .reduce_scatter_count = 60,
          .all_reduce_count = 15,
          .transport = "shared memory"};
}

TEST(Claims, LossHasToFallAndToFollow) {
  const TrainingResult alone = good_result();
  TrainingResult mesh = alone;
  mesh.losses[1] += 0.005;
  EXPECT_TRUE(loss_claim(mesh, alone).holds);
  EXPECT_THAT(loss_claim(mesh, alone).number, HasSubstr("0.0050"));
  mesh.losses[1] += 0.006;
  EXPECT_FALSE(loss_claim(mesh, alone).holds);
  mesh.losses[1] = NAN;
  EXPECT_FALSE(loss_claim(mesh, alone).holds);
  mesh.losses.pop_back();
  EXPECT_FALSE(loss_claim(mesh, alone).holds);
  mesh.losses = {2.3, 2.3, 2.3};
  EXPECT_FALSE(loss_claim(mesh, mesh).holds);
  EXPECT_FALSE(loss_claim({}, {}).holds);
}

TEST(Claims, AccuracyHasToFollow) {
  TrainingResult mesh = good_result();
  mesh.test_accuracy += 0.009;
  EXPECT_TRUE(accuracy_claim(mesh, good_result()).holds);
  mesh.test_accuracy += 0.002;
  EXPECT_FALSE(accuracy_claim(mesh, good_result()).holds);
}

TEST(Claims, CollectivesAreCounted) {
  EXPECT_TRUE(collectives_claim(good_result()).holds);
  for (const int wrong : {0, 1, 2}) {
    TrainingResult result = good_result();
    result.all_reduce_count += wrong == 0 ? 1 : 0;
    result.reduce_scatter_count -= wrong == 1 ? 1 : 0;
    result.bucket_count += wrong == 2 ? 1 : 0;
    EXPECT_FALSE(collectives_claim(result).holds) << wrong;
  }
  EXPECT_FALSE(collectives_claim({}).holds);
}

TEST(Claims, BitsAreComparedAndTheRunsHaveToDiffer) {
  TrainingResult tcp = good_result();
  tcp.transport = "tcp";
  tcp.bucket_count = 2;
  EXPECT_TRUE(same_bits_claim({good_result(), tcp}).holds);
  TrainingResult other = tcp;
  other.hash = "00000000000000ab";
  EXPECT_FALSE(same_bits_claim({good_result(), tcp, other}).holds);
  EXPECT_THAT(same_bits_claim({good_result(), other}).number, HasSubstr("aa, 00000000000000ab"));
  EXPECT_FALSE(same_bits_claim({good_result(), good_result()}).holds);
}

TEST(Screen, OneBadClaimIsABadEnd) {
  std::ostringstream out;
  Screen screen(out, false);
  EXPECT_FALSE(screen.all_hold()) << "no claim, no proof";
  screen.show({.claim = "water is wet", .number = "100 %", .holds = true});
  EXPECT_TRUE(screen.all_hold());
  screen.show({.claim = "fire is cold", .number = "0 K", .holds = false, .details = {"it burns"}});
  screen.end(3);
  EXPECT_FALSE(screen.all_hold());
  EXPECT_THAT(out.str(), HasSubstr("    ok  water is wet"));
  EXPECT_THAT(out.str(), HasSubstr("FAILED  fire is cold"));
  EXPECT_THAT(out.str(), HasSubstr("it burns"));
  EXPECT_THAT(out.str(), HasSubstr("2 claims, 1 FAILED"));
  EXPECT_THAT(out.str(), Not(HasSubstr("\033"))) << "colours are for terminals";
}

TEST(Screen, LongDetailsAreWrapped) {
  std::ostringstream out;
  Screen screen(out, false);
  std::string words;
  for (int i = 0; i < 60; ++i) {
    words += "word ";
  }
  screen.show({.claim = "long", .number = "60", .holds = true, .details = {words}});
  std::istringstream lines(out.str());
  int line_count = 0;
  for (std::string line; std::getline(lines, line); ++line_count) {
    EXPECT_LE(line.size(), 98U);
  }
  EXPECT_EQ(line_count, 5);
}

TEST(TrainingResult, SurvivesTheFileToTheBit) {
  const std::string path = testing::TempDir() + "result.json";
  TrainingResult written = good_result();
  written.losses = {1.0 / 3, 1e-300, 2.3};
  write_result(path, written);
  const TrainingResult read = read_result(path);
  EXPECT_EQ(read.losses, written.losses);
  EXPECT_EQ(read.hash, written.hash);
  EXPECT_EQ(read.reduce_scatter_count, written.reduce_scatter_count);
  EXPECT_EQ(read.transport, written.transport);
  std::ofstream(path) << "{}";
  EXPECT_THROW(static_cast<void>(read_result(path)), std::runtime_error);
}

TEST(TrainingResult, HashSeesEveryBit) {
  std::vector<Parameter> parameters = {{"w", {2}, {1.0F, 2.0F}}};
  const std::vector<double> losses = {1.0};
  const std::string hash = hash_of_bits(parameters, losses);
  EXPECT_EQ(hash.size(), 16U);
  EXPECT_EQ(hash, hash_of_bits(parameters, losses));
  parameters[0].values[1] = std::nextafter(2.0F, 3.0F);
  EXPECT_NE(hash, hash_of_bits(parameters, losses));
  parameters[0].values[1] = 2.0F;
  EXPECT_NE(hash, hash_of_bits(parameters, std::vector<double>{std::nextafter(1.0, 2.0)}));
}

TEST(LossPlot, DrawsEveryCurveAndSkipsWhatIsNotFinite) {
  const std::string path = testing::TempDir() + "loss.svg";
  write_loss_plot(path, "a title",
                  {{"first", "#111111", 8, {2, 1, 0.5}}, {"second", "#222222", 2, {2, NAN, 0}}});
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_THAT(text.str(), HasSubstr("a title"));
  EXPECT_THAT(text.str(), HasSubstr("stroke=\"#111111\""));
  EXPECT_THAT(text.str(), HasSubstr("stroke=\"#222222\""));
  EXPECT_THAT(text.str(), Not(HasSubstr("nan")));
  EXPECT_THAT(text.str(), Not(HasSubstr("inf")));
  EXPECT_THROW(write_loss_plot("/nowhere/loss.svg", "", {{"a", "", 1, {1}}, {"b", "", 1, {1}}}),
               std::runtime_error);
}

}  // namespace
}  // namespace examples
