#include "hsdp/snapshot/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

#include "hsdp/error.h"
#include "hsdp/snapshot.h"

namespace hsdp {
namespace {

constexpr std::size_t kMaxWriteBytes = std::size_t{64} << 20;

constexpr const char* kEnding = ".tmp";

std::string temporary_name(const std::filesystem::path& path) {
  std::string name = ".";
  name += path.filename().string();
  name += '.';
  name += new_snapshot_id();
  name += kEnding;
  return name;
}

}  // namespace

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

void sync_folder(const std::filesystem::path& folder) {
  const comm::UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot sync a folder and answer EINVAL; ignore that.
  if (fd && (::fsync(fd.get()) == 0 || errno == EINVAL)) return;
  throw SnapshotError("snapshot: cannot sync the folder " + folder.string() + ": " +
                      std::generic_category().message(errno));
}

AtomicFile::AtomicFile(const std::filesystem::path& path, const char* component)
    : path_(path),
      component_(component),
      temporary_(folder_of(path) / temporary_name(path)),
      fd_(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  if (!fd_) fail("cannot create", errno);
}

bool AtomicFile::is_temporary(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with('.') && name.ends_with(kEnding);
}

AtomicFile::~AtomicFile() {
  if (fd_) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* what, int error) const {
  throw SnapshotError(component_ + (": " + std::string(what)) + " " + path_.string() + ": " +
                      std::generic_category().message(error));
}

void AtomicFile::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written =
        ::pwrite(fd_.get(), bytes.data(), std::min(bytes.size(), kMaxWriteBytes),
                 static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("cannot write", written < 0 ? errno : EIO);
    offset += static_cast<std::uint64_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_.get()) != 0) fail("cannot sync", errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot rename", errno);
  fd_.reset();
  sync_folder(folder_of(path_));
}

}  // namespace hsdp
