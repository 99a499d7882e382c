#include "examples/digits/digit_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>

#include "examples/digits/batch_source.h"
#include "examples/digits/parameter.h"
#include "hsdp/error.h"

namespace examples {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

std::string image_line(int pixel, int label) {
  std::string line;
  for (std::size_t i = 0; i < kPixelCount; ++i) {
    line += std::to_string(pixel) + ",";
  }
  return line + std::to_string(label) + "\n";
}

std::string temporary_file(const std::string& text) {
  const std::string path = testing::TempDir() + "digits_" +
                           testing::UnitTest::GetInstance()->current_test_info()->name() + ".csv";
  std::ofstream(path) << text;
  return path;
}

TEST(DigitSet, EveryFifthImageIsForTesting) {
  std::string text;
  for (int i = 0; i < 10; ++i) {
    text += image_line(i, i);
  }
  const DigitData data = load_digits(temporary_file(text));
  EXPECT_EQ(data.train.labels, (std::vector<int>{0, 1, 2, 3, 5, 6, 7, 8}));
  EXPECT_EQ(data.test.labels, (std::vector<int>{4, 9}));
  EXPECT_EQ(data.train.image(3)[0], 3.0F / 16);
  EXPECT_EQ(data.test.image(1)[63], 9.0F / 16);
}

TEST(DigitSet, BadLinesAreNamed) {
  const std::string good = image_line(16, 9);
  for (const std::string& bad :
       {image_line(17, 0), image_line(0, 10), good.substr(2), "0," + good, std::string("x\n"),
        std::string("\n"), image_line(-1, 0), good.substr(0, 40)}) {
    const std::string path = temporary_file(good + bad);
    EXPECT_THAT([&] { static_cast<void>(load_digits(path)); },
                ThrowsMessage<std::runtime_error>(HasSubstr(path + ", line 2: expected")))
        << bad;
  }
}

TEST(DigitSet, MissingAndTooShortFilesSayWhatToDo) {
  EXPECT_THAT([] { static_cast<void>(load_digits("/nowhere/digits.csv")); },
              ThrowsMessage<std::runtime_error>(HasSubstr("fetch_digits.sh")));
  const std::string empty = temporary_file("");
  EXPECT_THAT([&] { static_cast<void>(load_digits(empty)); },
              ThrowsMessage<std::runtime_error>(HasSubstr("got 0")));
}

TEST(BatchOrder, EachEpochHoldsEachImageOnceInAnOrderOfItsOwn) {
  BatchOrder order(101, 7);
  const std::vector<std::size_t> first = order.indices(0, 101);
  const std::vector<std::size_t> second = order.indices(101, 101);
  EXPECT_NE(first, second);
  std::vector<std::size_t> all(101);
  std::iota(all.begin(), all.end(), std::size_t{0});
  for (std::vector<std::size_t> epoch : {first, second}) {
    EXPECT_NE(epoch, all);
    std::sort(epoch.begin(), epoch.end());
    EXPECT_EQ(epoch, all);
  }
  // Asking in another way and out of order gives the same batches.
  BatchOrder again(101, 7);
  EXPECT_EQ(again.indices(101, 101), second);
  EXPECT_EQ(again.indices(90, 11), std::vector<std::size_t>(first.end() - 11, first.end()));
}

TEST(BatchSource, MicrobatchesOfAllRanksMakeUpTheBatch) {
  DigitSet images;
  images.pixels.resize(100 * kPixelCount);
  images.labels.resize(100);
  std::iota(images.labels.begin(), images.labels.end(), 0);
  TrainingOptions options;
  options.batch_size = 48;
  options.microbatch_count = 3;
  BatchSource ranks(images, options, 4);
  BatchSource alone(images, options, 1);
  std::vector<int> labels;
  for (std::size_t microbatch = 0; microbatch < 3; ++microbatch) {
    for (int rank = 0; rank < 4; ++rank) {
      const DigitSet part = ranks.microbatch(5, microbatch, rank);
      labels.insert(labels.end(), part.labels.begin(), part.labels.end());
    }
  }
  EXPECT_EQ(labels, alone.whole_batch(5).labels);
}

TEST(BatchSource, ABatchThatDoesNotDivideIsAnError) {
  TrainingOptions options;
  options.batch_size = 50;
  EXPECT_THAT(([&] { BatchSource source(DigitSet{}, options, 4); }),
              ThrowsMessage<hsdp::UsageError>(HasSubstr("multiple of 16")));
}

TEST(Parameters, ValuesSurviveTheFileAndOtherSizesAreAnError) {
  const std::string path = temporary_file("");
  std::vector<Parameter> parameters = initial_parameters(1);
  const std::vector<Parameter> written = initial_parameters(2);
  EXPECT_NE(parameters[0].values, written[0].values);
  write_values(path, written);
  read_values(path, parameters);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    EXPECT_EQ(parameters[p].values, written[p].values);
  }
  std::ofstream(path, std::ios::app) << 'x';
  EXPECT_THROW(read_values(path, parameters), std::runtime_error);
  std::ofstream(path) << "short";
  EXPECT_THROW(read_values(path, parameters), std::runtime_error);
}

}  // namespace
}  // namespace examples
