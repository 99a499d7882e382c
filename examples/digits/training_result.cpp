#include "examples/digits/training_result.h"

#include <cstddef>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

namespace examples {
namespace {

class BitHash {
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) {
      state_ = (state_ ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001b3U;
    }
  }
  [[nodiscard]] std::string digits() const {
    std::ostringstream text;
    text << std::hex << std::setw(16) << std::setfill('0') << state_;
    return text.str();
  }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325U;
};

}  // namespace

std::string hash_of_bits(const std::vector<Parameter>& parameters, std::span<const double> losses) {
  BitHash hash;
  for (const Parameter& parameter : parameters) {
    hash.add(std::as_bytes(std::span(parameter.values)));
  }
  hash.add(std::as_bytes(losses));
  return hash.digits();
}

void report(const std::filesystem::path& path, const TrainingResult& result) {
  const std::string bits = result.hash.empty() ? "" : ", bits " + result.hash;
  std::printf("loss %.4f, %.1f %% of unseen digits right%s, %.1f s\n",
              result.losses.empty() ? 0 : result.losses.back(), 100 * result.test_accuracy,
              bits.c_str(), result.seconds);
  write_result(path, result);
}

void write_result(const std::filesystem::path& path, const TrainingResult& result) {
  if (path.empty()) {
    return;
  }
  const nlohmann::json json = {{"losses", result.losses},
                               {"test_accuracy", result.test_accuracy},
                               {"hash", result.hash},
                               {"seconds", result.seconds},
                               {"bucket_count", result.bucket_count},
                               {"reduce_scatter_count", result.reduce_scatter_count},
                               {"all_reduce_count", result.all_reduce_count},
                               {"transport", result.transport}};
  std::ofstream file(path);
  file << json.dump(1) << '\n';
  file.close();
  if (!file) {
    throw std::runtime_error("result: cannot write " + path.string());
  }
}

TrainingResult read_result(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) {
    throw std::runtime_error("result: cannot open " + path.string());
  }
  try {
    const nlohmann::json json = nlohmann::json::parse(file);
    TrainingResult result;
    json.at("losses").get_to(result.losses);
    json.at("test_accuracy").get_to(result.test_accuracy);
    json.at("hash").get_to(result.hash);
    json.at("seconds").get_to(result.seconds);
    json.at("bucket_count").get_to(result.bucket_count);
    json.at("reduce_scatter_count").get_to(result.reduce_scatter_count);
    json.at("all_reduce_count").get_to(result.all_reduce_count);
    json.at("transport").get_to(result.transport);
    return result;
  } catch (const nlohmann::json::exception& error) {
    throw std::runtime_error("result: " + path.string() + ": " + error.what());
  }
}

}  // namespace examples
