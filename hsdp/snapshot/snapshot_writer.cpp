#include <pthread.h>
#include <sys/mman.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "hsdp/device/all_signals_blocked.h"
#include "hsdp/error.h"
#include "hsdp/snapshot/snapshot_file_writer.h"

namespace hsdp {
namespace {

// Owns anonymous memory. Without huge pages: waiting for them costs more than they save.
class Memory {
 public:
  Memory() = default;
  Memory(std::size_t size_bytes, MemoryCount& count) : size_bytes_(size_bytes) {
    void* data =
        ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      throw SnapshotError("snapshot: no memory for a copy of " + std::to_string(size_bytes) +
                          " bytes; free memory, or flush() earlier snapshots first");
    }
    data_ = static_cast<std::byte*>(data);
    held_ = count.hold(MemoryKind::kSnapshot, static_cast<std::int64_t>(size_bytes));
  }
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    std::swap(held_, other.held_);
    return *this;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (data_ != nullptr) ::munmap(data_, size_bytes_);
  }

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size_in_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  MemoryCount::Held held_;
};

// A private copy of the data of one file.
struct DataCopy {
  Memory memory;
  std::vector<std::span<const std::byte>> parts;
};

using Parts = std::vector<std::span<const std::byte>>;

std::size_t total_bytes(const Parts& parts) {
  std::size_t total = 0;
  for (const auto& part : parts) total += part.size();
  return total;
}

DataCopy copy_data(const Parts& parts, Memory memory) {
  DataCopy copy{std::move(memory), {}};
  std::byte* place = copy.memory.data();
  for (const auto& bytes : parts) {
    if (!bytes.empty()) std::memcpy(place, bytes.data(), bytes.size());
    copy.parts.emplace_back(place, bytes.size());
    place += bytes.size();
  }
  return copy;
}

struct Job {
  SnapshotFileWriter file;
  DataCopy data;
};

}  // namespace

class SnapshotWriter::Queue {
 public:
  explicit Queue(MemoryCount count) : count_(std::move(count)) {
    const AllSignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
    ::pthread_setname_np(thread_.native_handle(), "hsdp-snapshot");
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  ~Queue() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // Memory for a copy. Reuses that of an earlier copy if it is large enough: its pages already
  // exist.
  Memory memory(std::size_t size_bytes) {
    if (size_bytes == 0) return {};
    Memory spare;
    {
      const std::lock_guard lock(mutex_);
      spare = std::move(spare_);
    }
    if (spare.size_in_bytes() >= size_bytes) return spare;
    spare = {};  // free it before allocating more
    return {size_bytes, count_};
  }

  void push(Job job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_all();
  }

  void flush() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return jobs_.empty() && !writing_; });
    rethrow(lock);
  }

  void rethrow_earlier_error() {
    std::unique_lock lock(mutex_);
    rethrow(lock);
  }

 private:
  void rethrow(std::unique_lock<std::mutex>& lock) {
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) {
      lock.unlock();
      std::rethrow_exception(error);
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      writing_ = true;
      {
        Job job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        const std::exception_ptr error = write(job);
        lock.lock();
        if (error && !error_) error_ = error;
        if (job.data.memory.size_in_bytes() > spare_.size_in_bytes()) {
          spare_ = std::move(job.data.memory);
        }
      }
      writing_ = false;
      changed_.notify_all();
    }
  }

  static std::exception_ptr write(Job& job) {
    try {
      job.file.write(job.data.parts);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  MemoryCount count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  Memory spare_;
  std::exception_ptr error_;
  bool writing_ = false;
  bool closing_ = false;
  std::thread thread_;
};

SnapshotWriter::SnapshotWriter(MemoryCount count)
    : queue_(std::make_unique<Queue>(std::move(count))) {}

SnapshotWriter::~SnapshotWriter() = default;

void SnapshotWriter::submit(const std::filesystem::path& path, const SnapshotInfo& info,
                            std::span<const SnapshotEntry> entries,
                            std::span<const SnapshotState> hop_state) {
  queue_->rethrow_earlier_error();
  SnapshotFileWriter file = SnapshotFileWriter::open(path, info, entries, hop_state);
  const Parts parts = all_bytes(entries, hop_state);
  queue_->push({std::move(file), copy_data(parts, queue_->memory(total_bytes(parts)))});
}

void SnapshotWriter::flush() { queue_->flush(); }

}  // namespace hsdp
