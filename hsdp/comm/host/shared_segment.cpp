#include "hsdp/comm/host/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <system_error>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/descriptor_limit.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/host/page.h"
#include "hsdp/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace hsdp::comm {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

[[noreturn]] void throw_errno(const std::string& what, const std::string& action,
                              std::size_t size) {
  const std::string reason = std::generic_category().message(errno);
  throw Error("host memory: " + action + " " + std::to_string(size) + " bytes for " + what +
              " failed: " + reason + "; free memory, or use smaller bucket_bytes");
}

// Maps at a huge page boundary, so that the kernel can use huge pages.
std::byte* map_aligned(int fd, std::size_t size) {
  if (size < kHugePage) {
    void* const place = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return place == MAP_FAILED ? nullptr : static_cast<std::byte*>(place);
  }
  void* const space = ::mmap(nullptr, size + kHugePage, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(space);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t lead = (kHugePage - address % kHugePage) % kHugePage;
  void* const place =
      ::mmap(begin + lead, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (place == MAP_FAILED) {
    ::munmap(begin, size + kHugePage);
    return nullptr;
  }
  if (lead > 0) ::munmap(begin, lead);
  ::munmap(begin + lead + size, kHugePage - lead);
  ::madvise(place, size, MADV_HUGEPAGE);  // a hint: small pages work, too
  return static_cast<std::byte*>(place);
}

// Makes huge pages even if they are switched off for memory files, by collapsing regions that have
// a page. Only a hint, too.
void prefer_huge_pages(std::byte* data, std::size_t size) {
  const std::size_t huge = size / kHugePage * kHugePage;
  for (std::size_t at = 0; at < huge; at += kHugePage) {
    if (::madvise(data + at, kPageBytes, MADV_POPULATE_WRITE) != 0) return;
  }
  if (huge > 0) ::madvise(data, huge, MADV_COLLAPSE);
}

// This process's segments, by number, for peers that are threads.
struct SegmentTable {
  std::mutex mutex;
  std::uint64_t next = 1;
  std::map<std::uint64_t, std::weak_ptr<SharedSegment>> segments;
};

SegmentTable& segment_table() {
  static auto* const table = new SegmentTable;
  return *table;
}

std::uint64_t publish(const std::shared_ptr<SharedSegment>& segment) {
  SegmentTable& table = segment_table();
  const std::lock_guard lock(table.mutex);
  std::erase_if(table.segments, [](const auto& entry) { return entry.second.expired(); });
  table.segments.emplace(table.next, segment);
  return table.next++;
}

std::shared_ptr<SharedSegment> find_published(std::uint64_t number) {
  SegmentTable& table = segment_table();
  const std::lock_guard lock(table.mutex);
  const auto found = table.segments.find(number);
  return found == table.segments.end() ? nullptr : found->second.lock();
}

}  // namespace

SharedSegment::SharedSegment(UniqueFd fd, std::size_t size)
    : fd_(std::move(fd)),
      data_(map_aligned(fd_.get(), size)),
      size_(size),
      generation_(fork_generation()) {}

SharedSegment::~SharedSegment() {
  if (data_ != nullptr && generation_ == fork_generation()) ::munmap(data_, size_);
}

void SharedSegment::populate(const std::string& what) {
  if (data_ == nullptr) throw_errno(what, "mapping", size_);
  if (::madvise(data_, size_, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) throw_errno(what, "backing", size_);
  // Kernels before 5.14: reserve the pages first, so that touching them cannot raise a signal.
  const int error = ::posix_fallocate(fd_.get(), 0, static_cast<off_t>(size_));
  if (error != 0) {
    errno = error;
    throw_errno(what, "backing", size_);
  }
  for (std::size_t at = 0; at < size_; at += kPageBytes) {
    std::atomic_ref(reinterpret_cast<std::uint32_t&>(data_[at])).fetch_add(0);
  }
}

std::shared_ptr<SharedSegment> SharedSegment::create(std::size_t size, const std::string& what) {
  const std::size_t pages = std::max(kPageBytes, whole_pages(size));
  UniqueFd fd(::memfd_create(("hsdp " + what).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(pages)) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_if_descriptor_limit("host memory: cannot make memory for " + what);
    throw_errno(what, "reserving", pages);
  }
  std::shared_ptr<SharedSegment> segment(new SharedSegment(std::move(fd), pages));
  if (segment->data_ != nullptr) prefer_huge_pages(segment->data_, pages);
  segment->populate(what);
  return segment;
}

std::shared_ptr<SharedSegment> SharedSegment::map(UniqueFd fd, const std::string& what) {
  struct stat status {};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (::fstat(fd.get(), &status) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error("host memory: a peer's descriptor for " + what +
                " was refused: expected memory sealed against shrinking");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  std::shared_ptr<SharedSegment> segment(new SharedSegment(std::move(fd), size));
  segment->populate(what);
  segment->close_descriptor();
  return segment;
}

void SharedSegment::hide_from_children() { ::madvise(data_, size_, MADV_DONTFORK); }

std::vector<std::shared_ptr<SharedSegment>> exchange_segments(
    Control& control, const std::string& key, std::span<const int> members,
    const std::shared_ptr<SharedSegment>& mine, const std::string& reason) {
  if (members.size() == 1) {
    if (mine == nullptr) throw AgreedError(reason, control.rank(), control.size());
    mine->close_descriptor();
    return {mine};
  }
  std::string message = "!";
  if (mine == nullptr) {
    message += reason;
  } else {
    message = std::to_string(control.in_process() ? publish(mine) : 0);
  }
  const auto messages = control.exchange(key, members, message, {.operation = "allocate"});
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].starts_with('!')) {
      throw AgreedError(messages[i].substr(1), members[i], control.size());
    }
  }
  std::vector<UniqueFd> descriptors;
  if (!control.in_process()) {
    descriptors = control.exchange_descriptors(key + "/fd", members, mine->descriptor());
  }
  std::vector<std::shared_ptr<SharedSegment>> segments(members.size());
  std::string failure;
  try {
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (members[i] == control.rank()) {
        segments[i] = mine;
      } else if (control.in_process()) {
        segments[i] = find_published(std::stoull(messages[i]));
      } else {
        segments[i] = SharedSegment::map(std::move(descriptors[i]), "a peer");
      }
      if (segments[i] != nullptr) continue;
      throw Error("host memory: rank " + std::to_string(members[i]) + " left while sharing memory");
    }
  } catch (const std::exception& error) {
    control.throw_if_failed();
    failure = error.what();
  }
  // All have the memory or none does. A segment's number is valid only while its owner holds it.
  throw_agreed(control.exchange(key + "/taken", members, failure, {.operation = "allocate"}),
               members, control);
  mine->close_descriptor();
  return segments;
}

}  // namespace hsdp::comm
