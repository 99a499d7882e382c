#include "hsdp/snapshot/snapshot_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "hsdp/error.h"
#include "hsdp/snapshot/block_checksums.h"

namespace hsdp {
namespace {

constexpr std::size_t kReadBytes = std::size_t{1} << 20;

std::string cause() { return std::generic_category().message(errno); }

// O_NONBLOCK: refuse a pipe under a snapshot's name instead of waiting for it.
comm::UniqueFd open_file(const std::filesystem::path& path) {
  return comm::UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
}

struct stat status_of(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw SnapshotError("cannot read: " + cause());
  if (!S_ISREG(status.st_mode)) throw SnapshotError("not a regular file");
  return status;
}

void read_exactly(int fd, std::uint64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw SnapshotError("cannot read: " + cause());
    if (got == 0) throw SnapshotError("truncated while it was read");
    offset += static_cast<std::uint64_t>(got);
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

// Reads the prefix and checks it against the file's size.
HeaderPrefix read_prefix(int fd, std::uint64_t file_bytes) {
  PrefixBytes bytes;
  const auto available = std::span(bytes).first(std::min<std::uint64_t>(bytes.size(), file_bytes));
  read_exactly(fd, 0, available);
  const HeaderPrefix prefix = decode_prefix(available);
  if (prefix.file_bytes != file_bytes) {
    throw SnapshotError(
        (file_bytes < prefix.file_bytes ? "truncated" : "has foreign bytes behind") +
        std::string(": expected ") + std::to_string(prefix.file_bytes) + " bytes, got " +
        std::to_string(file_bytes));
  }
  if (prefix.json_bytes > kMaxHeaderJsonBytes ||
      prefix.json_bytes > file_bytes - kHeaderPrefixBytes) {
    throw SnapshotError("impossible header length");
  }
  return prefix;
}

}  // namespace

void SnapshotFile::fail(const std::string& what) const {
  throw SnapshotError("snapshot: " + printable(path_.string()) + ": " + what);
}

SnapshotFile SnapshotFile::open(const std::filesystem::path& path) {
  SnapshotFile file;
  file.path_ = path;
  const comm::UniqueFd fd = open_file(path);
  if (!fd) file.fail("cannot open: " + cause());
  try {
    file.load(fd.get());
  } catch (const SnapshotError& error) {
    file.fail(error.what());
  }
  return file;
}

void SnapshotFile::load(int fd) {
  const struct stat status = status_of(fd);
  device_ = status.st_dev;
  inode_ = status.st_ino;
  file_bytes_ = static_cast<std::uint64_t>(status.st_size);
  const HeaderPrefix prefix = read_prefix(fd, file_bytes_);
  std::string json(prefix.json_bytes, '\0');
  read_exactly(fd, kHeaderPrefixBytes, std::as_writable_bytes(std::span(json)));
  if (header_checksum(prefix, json) != prefix.header_checksum) {
    throw SnapshotError("damaged: the header does not match its checksum");
  }
  header_ = decode_json(json, file_bytes_);
  load_structure(fd, kHeaderPrefixBytes + json.size(), prefix);
}

// Loads everything except header and data: HDF5's structure and the table of block checksums.
void SnapshotFile::load_structure(int fd, std::uint64_t header_bytes, const HeaderPrefix& prefix) {
  std::vector<std::byte> buffer(std::min<std::uint64_t>(kReadBytes, file_bytes_));
  RunningChecksum sum;
  for (ByteRange range : structure_ranges(header_, header_bytes, file_bytes_)) {
    while (range.begin < range.end) {
      const auto bytes =
          std::span(buffer).first(std::min<std::uint64_t>(buffer.size(), range.end - range.begin));
      read_exactly(fd, range.begin, bytes);
      sum.add(bytes);
      range.begin += bytes.size();
    }
  }
  if (sum.value() != prefix.structure_checksum) {
    throw SnapshotError("damaged: the HDF5 structure does not match its checksum");
  }
  block_checksums_.resize(header_.block_count);
  read_exactly(fd, header_.checksums_offset, std::as_writable_bytes(std::span(block_checksums_)));
}

comm::UniqueFd SnapshotFile::reopen() const {
  comm::UniqueFd fd = open_file(path_);
  if (!fd) fail("cannot open: " + cause());
  const struct stat status = status_of(fd.get());
  if (status.st_dev != device_ || status.st_ino != inode_ ||
      static_cast<std::uint64_t>(status.st_size) != file_bytes_) {
    fail("was replaced while it was read; read it again when the save is over");
  }
  ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  return fd;
}

std::span<const std::byte> SnapshotFile::read_block(int fd, const SnapshotSlice& slice,
                                                    std::size_t block,
                                                    std::span<std::byte> buffer) const {
  const std::uint64_t begin = std::uint64_t{block} * kChecksumBlockBytes;
  const auto bytes =
      buffer.first(std::min<std::uint64_t>(kChecksumBlockBytes, slice.data_bytes() - begin));
  try {
    read_exactly(fd, slice.data_offset + begin, bytes);
  } catch (const SnapshotError& error) {
    fail(error.what());
  }
  if (checksum(bytes) != block_checksums_[slice.first_block + block]) {
    fail("damaged: elements " +
         std::to_string(slice.offset +
                        static_cast<std::int64_t>(begin / size_bytes(slice.data_dtype))) +
         " and following of '" + printable(slice.name) + "' do not match their checksum");
  }
  return bytes;
}

bool is_snapshot_file(const std::filesystem::path& path) {
  std::error_code error;  // on an error, it is not a file
  if (!std::filesystem::is_regular_file(path, error)) return false;
  const comm::UniqueFd file = open_file(path);
  std::array<char, kSnapshotMagic.size()> front{};
  return file && ::pread(file.get(), front.data(), front.size(), 0) == std::ssize(front) &&
         std::string_view(front.data(), front.size()) == kSnapshotMagic;
}

}  // namespace hsdp
