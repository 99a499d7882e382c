#include "hsdp/comm/host/host_allocation.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

// Drops this rank's part when the last view is destroyed. A forked child's last view does not
// count: peers still read the parent's memory.
class OwnPart {
 public:
  OwnPart(std::shared_ptr<HostMemory> memory, std::uint32_t part)
      : memory_(std::move(memory)), part_(part), generation_(fork_generation()) {}
  OwnPart(const OwnPart&) = delete;
  OwnPart& operator=(const OwnPart&) = delete;
  ~OwnPart() {
    if (generation_ == fork_generation()) memory_->drop_own(part_);
  }

 private:
  std::shared_ptr<HostMemory> memory_;
  std::uint32_t part_;
  std::uint32_t generation_;
};

}  // namespace

SharedMemory allocate_shared(HostGroup& group, std::int64_t count, Dtype dtype) {
  HostMemory& memory = group.memory();
  memory.forget_dropped();
  group.agree({.operation = Operation::kAllocate, .dtype = dtype, .wire = dtype});
  const std::size_t size = static_cast<std::size_t>(count) * size_bytes(dtype);
  const std::uint32_t part = memory.next_part();
  std::shared_ptr<SharedSegment> mine;
  std::string message;
  try {
    mine = SharedSegment::create(HostMemory::segment_size(size), "allocation");
    message = std::to_string(part);
  } catch (const std::exception& error) {
    message = std::string("!") + error.what();
  }
  const auto parts = group.exchange("part", message);
  std::vector<std::string> reasons;  // from neighbours and others
  reasons.reserve(parts.size());
  for (const std::string& text : parts) {
    reasons.push_back(text.starts_with('!') ? text.substr(1) : std::string());
  }
  Control& control = group.control();
  throw_agreed(reasons, group.members(), control);
  const std::string key = group.id() + "/" + std::to_string(group.sequence()) + "/memory";
  std::vector<std::shared_ptr<SharedSegment>> segments;
  std::string failure;
  try {
    segments = exchange_segments(control, key, group.neighbours(), mine, {});
  } catch (const AgreedError& error) {  // the members on other hosts have not seen it
    if (group.shares_memory()) throw;
    if (error.rank() == control.rank()) failure = error.reason();
  }
  if (!group.shares_memory()) {
    throw_agreed(group.exchange("mapped", failure), group.members(), control);
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const int owner = group.neighbours()[i];
    if (owner == group.control().rank()) continue;
    const auto place = std::ranges::find(group.members(), owner) - group.members().begin();
    memory.add_peer(owner,
                    static_cast<std::uint32_t>(std::stoul(parts[static_cast<size_t>(place)])),
                    segments[i]);
  }
  std::byte* const data = mine->data();
  memory.add_own(part, std::move(mine), size, group.neighbours());
  return SharedMemory(std::make_shared<OwnPart>(group.world()->memory, part),
                      {data, count, dtype, {}});
}

}  // namespace hsdp::comm
