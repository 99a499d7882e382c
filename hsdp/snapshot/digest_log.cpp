#include "hsdp/snapshot/digest_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "hsdp/error.h"

namespace hsdp {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kLineEnd = " .";  // a torn line lacks it

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what) {
  throw SnapshotError("digests: " + path.string() + ": " + what);
}

std::string text_of(const DigestHeader& header) {
  ordered_json parts = ordered_json::array();
  for (const DigestHeader::Part& part : header.parts) {
    parts.push_back({part.name, part.offset, part.count});
  }
  const ordered_json json{{"hsdp_digests", 1},          {"reducer", header.reducer},
                          {"rank", header.rank},        {"replicate", header.replicate_size},
                          {"shard", header.shard_size}, {"slices", std::move(parts)}};
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

DigestHeader header_of(const std::string& line, const std::filesystem::path& path) {
  try {
    const auto json = nlohmann::json::parse(line);
    if (json.at("hsdp_digests") != 1) refuse(path, "expected version 1 of digests, got another");
    DigestHeader header{json.at("reducer"), json.at("rank"), json.at("replicate"),
                        json.at("shard")};
    for (const auto& part : json.at("slices")) {
      header.parts.push_back({part.at(0), part.at(1), part.at(2)});
    }
    return header;
  } catch (const nlohmann::json::exception&) {
    refuse(path, "expected a first line of digests, got something else");
  }
}

template <typename Number>
bool take(std::string_view& text, Number& number, int base) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  if (text.empty() || text.front() != ' ') return false;
  text.remove_prefix(1);
  return true;
}

void read_line(std::string_view line, DigestLog& log) {
  std::int64_t step = 0;
  std::vector<std::uint64_t> digests(log.header.parts.size());
  if (!take(line, step, 10)) return;
  for (std::uint64_t& digest : digests) {
    if (!take(line, digest, 16)) return;
  }
  if (line != kLineEnd.substr(1)) return;
  log.steps.erase(log.steps.lower_bound(step), log.steps.end());
  log.steps[step] = std::move(digests);
}

// Returns nothing if the line is torn.
std::optional<std::string> first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line) || file.eof()) return std::nullopt;
  return line;
}

// Writes all of the text or none of it.
void write_whole(int fd, const std::string& text, const std::filesystem::path& path) {
  const off_t size = ::lseek(fd, 0, SEEK_END);
  const ssize_t count = ::write(fd, text.data(), text.size());
  if (count == static_cast<ssize_t>(text.size())) return;
  const std::string why = count < 0 ? std::strerror(errno) : "there is no room";
  static_cast<void>(::ftruncate(fd, size));  // if this fails, readers skip the torn line
  refuse(path, "cannot write it: " + why);
}

}  // namespace

DigestWriter::DigestWriter(std::filesystem::path folder, const DigestHeader& header)
    : folder_(std::move(folder)), path_(digest_path(folder_, header.rank)) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) refuse(folder_, "cannot make this folder: " + error.message());
  fd_ = comm::UniqueFd(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!fd_) refuse(path_, std::string("cannot open it: ") + std::strerror(errno));
  if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
    refuse(path_,
           "expected to be the only one that writes it, got another Reducer or job; give "
           "each a folder");
  }
  const auto line = first_line(path_);
  if (!line) {
    if (::ftruncate(fd_.get(), 0) != 0) {
      refuse(path_, std::string("cannot write it: ") + std::strerror(errno));
    }
    write_whole(fd_.get(), text_of(header) + "\n", path_);
    return;
  }
  if (header_of(*line, path_) != header) {
    refuse(path_,
           "expected digests of this mesh and these parameters, got another run's; give "
           "each run a folder");
  }
  write_whole(fd_.get(), "\n", path_);  // ends a torn line
}

void DigestWriter::append(std::int64_t step, std::span<const std::uint64_t> digests) {
  std::string line = std::to_string(step);
  char digits[16];
  for (const std::uint64_t digest : digests) {
    line += ' ';
    line.append(digits, std::to_chars(digits, digits + sizeof digits, digest, 16).ptr);
  }
  line += kLineEnd;
  line += '\n';
  write_whole(fd_.get(), line, path_);
}

std::filesystem::path digest_path(const std::filesystem::path& folder, int rank) {
  return folder / ("digests_" + std::to_string(rank) + ".txt");
}

DigestLog read_digests(const std::filesystem::path& folder, int rank,
                       const std::optional<DigestHeader>& first) {
  const std::filesystem::path path = digest_path(folder, rank);
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) refuse(path, "expected digests of that rank, got none");
  DigestLog log{header_of(line, path), {}};
  const DigestHeader& run = first ? *first : log.header;
  if (log.header.rank != rank || rank >= run.replicate_size * run.shard_size ||
      log.header.replicate_size != run.replicate_size || log.header.shard_size != run.shard_size) {
    refuse(path, "expected rank " + std::to_string(rank) + " of a " +
                     std::to_string(run.replicate_size) + "x" + std::to_string(run.shard_size) +
                     " mesh, got another run's");
  }
  while (std::getline(file, line)) read_line(line, log);
  return log;
}

}  // namespace hsdp
