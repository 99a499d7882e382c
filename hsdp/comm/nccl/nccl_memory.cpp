#include "hsdp/comm/nccl/nccl_memory.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/nccl/nccl_group.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/cuda_call.h"
#include "hsdp/error.h"

namespace hsdp::comm {

// From NCCL, while its communicator lives; from the device's pool if the library lacks that.
class NcclMemory::Block {
 public:
  Block(const NcclGroup& group, std::size_t bytes)
      : world_(group.world()), link_(group.link()), bytes_(bytes) {
    const OnCudaDevice current(world_->device);
    is_of_nccl_ = link_ != nullptr && group.library().can_register() && bytes > 0;
    if (!is_of_nccl_) {
      buffer_ = Buffer(world_->device, bytes);
      data_ = buffer_.data();
      return;
    }
    data_ =
        take_memory<NcclError>(world_->device, [&] { return world_->library->allocate(bytes); });
    try {
      clear_cuda_memory(world_->device, data_, bytes);
    } catch (const Error&) {
      world_->library->free(data_);
      throw;
    }
  }
  ~Block() {
    if (!is_of_nccl_) return;
    give_back_on(world_->device, [this] {
      // Until everything is aborted, a kernel may write there and NCCL's threads may look it up:
      // leak it, and leave its registration to the abort.
      const bool is_used = world_->control->failed() && !world_->watch->aborted();
      if (!is_used) withdraw();
      link_.reset();
      if (!is_used) world_->library->free(data_);
    });
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void enroll() {
    if (is_of_nccl_) enrolled_ = link_->enroll(data_, bytes_);
  }
  void withdraw() {
    if (enrolled_ != nullptr) link_->withdraw(std::exchange(enrolled_, nullptr));
  }
  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  [[nodiscard]] bool is_registered() const { return enrolled_ != nullptr; }
  [[nodiscard]] bool holds(const void* memory) const {
    const auto* const place = static_cast<const std::byte*>(memory);
    const auto* const begin = static_cast<const std::byte*>(data_);
    return begin <= place && place < begin + bytes_;
  }

 private:
  std::shared_ptr<NcclWorld> world_;
  std::shared_ptr<NcclLink> link_;
  std::size_t bytes_;
  bool is_of_nccl_ = false;
  Buffer buffer_;
  void* data_ = nullptr;
  void* enrolled_ = nullptr;
};

NcclMemory::~NcclMemory() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kPatience{10};
  const auto end = Clock::now() + kPatience;
  for (std::unique_ptr<Work>& work : work_) {
    try {
      while (!work->free.complete() && Clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      if (work->free.complete()) continue;
    } catch (const Error&) {  // it never can be
    }
    static_cast<void>(work.release());
  }
}

void NcclMemory::stop_registering(NcclGroup& group) {
  registers_ = false;
  if (group.planned_calls() != nullptr) group.planned_calls()->forget();
  group.wait_for_calls();  // these may use registered memory
  for (const std::weak_ptr<Block>& entry : blocks_) {
    if (const auto block = entry.lock()) block->withdraw();
  }
}

std::shared_ptr<NcclMemory::Block> NcclMemory::make_block(NcclGroup& group, std::size_t bytes,
                                                          bool registered) {
  registered = registered && registers_;
  std::shared_ptr<Block> block;
  std::string reason;
  try {
    block = std::make_shared<Block>(group, bytes);
    if (registered) block->enroll();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  const bool is_registered = block != nullptr && (block->is_registered() || bytes == 0);
  std::vector<std::string> words = group.exchange("memory", (is_registered ? "1" : "0") + reason);
  const bool on_all =
      std::ranges::all_of(words, [](const std::string& word) { return word.front() == '1'; });
  for (std::string& word : words) word.erase(0, 1);
  if (block != nullptr && !on_all) block->withdraw();
  throw_agreed(words, group.members(), group.control());
  if (registered && !on_all) stop_registering(group);
  std::erase_if(blocks_, [](const std::weak_ptr<Block>& entry) { return entry.expired(); });
  blocks_.push_back(block);
  return block;
}

SharedMemory NcclMemory::allocate(NcclGroup& group, std::int64_t count, Dtype dtype) {
  group.agree({.operation = Operation::kAllocate, .dtype = dtype, .wire = dtype});
  const auto bytes = static_cast<std::size_t>(count) * size_bytes(dtype);
  const std::shared_ptr<Block> block = make_block(group, bytes, true);
  return SharedMemory(block, {block->data(), count, dtype, group.world()->device});
}

void NcclMemory::reserve(NcclGroup& group, std::size_t bytes, bool registered) {
  registered = registered && registers_;  // the same on all ranks
  if (has_work(bytes, registered)) return;
  std::shared_ptr<Block> block = make_block(group, bytes, registered);
  Work& work = *work_[block->is_registered() ? 1 : 0];
  if (work.block != nullptr && work.block->size() >= bytes) return;  // registering has just ended
  if (work.block != nullptr) work.outgrown.hold(work.free, std::move(work.block));
  work.block = std::move(block);
}

bool NcclMemory::is_registered(const void* memory) const {
  return std::ranges::any_of(blocks_, [memory](const std::weak_ptr<Block>& entry) {
    const auto block = entry.lock();
    return block != nullptr && block->is_registered() && block->holds(memory);
  });
}

NcclMemory::Work* NcclMemory::find_work(std::size_t bytes, bool registered) const {
  for (const std::unique_ptr<Work>& work : work_) {
    const Block* const block = work->block.get();
    const bool fits = block != nullptr && block->size() >= bytes;
    if (fits && block->is_registered() == registered) return work.get();
  }
  return nullptr;
}

bool NcclMemory::has_work(std::size_t bytes, bool registered) const {
  return find_work(bytes, registered) != nullptr;
}

std::int64_t NcclMemory::work_bytes() const {
  std::size_t bytes = 0;
  for (const std::unique_ptr<Work>& work : work_) {
    if (work->block != nullptr) bytes += work->block->size();
  }
  return static_cast<std::int64_t>(bytes);
}

std::byte* NcclMemory::take_work(std::size_t bytes, bool registered, Stream& stream) {
  taken_ = find_work(bytes, registered);
  if (taken_ == nullptr) return nullptr;
  stream.wait(taken_->free);
  return static_cast<std::byte*>(taken_->block->data());
}

void NcclMemory::release_work(const Event& done) {
  if (Work* const work = std::exchange(taken_, nullptr)) work->free = done;
}

}  // namespace hsdp::comm
