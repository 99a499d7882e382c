#include "hsdp/comm/mpi/mpi_split.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

// A rank's part in a split; any rank's tag may become the new group's.
struct SplitWish {
  int color = 0;
  int key = 0;
  int tag = 0;
};

SplitWish parse(const std::string& message) {
  SplitWish wish;
  std::istringstream(message) >> wish.color >> wish.key >> wish.tag;
  return wish;
}

struct Member {
  int key = 0;
  int rank = 0;
  int tag = 0;
};

}  // namespace

std::optional<MpiGroup::Place> split_group(MpiGroup& group, int color, int key) {
  group.agree({.operation = Operation::kSplit});
  const int own_tag = group.world()->reserve_tag();
  const auto messages = group.exchange(
      "split", std::to_string(color) + " " + std::to_string(key) + " " + std::to_string(own_tag));
  std::vector<Member> chosen;
  for (int r = 0; r < group.size(); ++r) {
    const SplitWish wish = parse(messages[static_cast<std::size_t>(r)]);
    if (wish.tag < 0) {
      throw AgreedError(
          "mpi: split: no tag is left for another group; reuse meshes and reducers instead of "
          "making new ones",
          group.peer(r), group.control().size());
    }
    if (wish.color == color) chosen.push_back({wish.key, r, wish.tag});
  }
  if (color < 0) return std::nullopt;
  std::ranges::stable_sort(chosen, {}, &Member::key);  // they are already in rank order
  MpiGroup::Place place{
      .id = group.id() + "." + std::to_string(group.sequence()) + "c" + std::to_string(color),
      .members = {},
      .tag = chosen.front().tag};
  for (const Member& member : chosen) place.members.push_back(group.peer(member.rank));
  return place;
}

SharedMemory allocate_private(MpiGroup& group, std::int64_t count, Dtype dtype) {
  constexpr std::align_val_t kAlignment{64};
  group.agree({.operation = Operation::kAllocate, .dtype = dtype, .wire = dtype});
  const std::size_t size = static_cast<std::size_t>(count) * size_bytes(dtype);
  std::shared_ptr<void> memory;
  std::string reason;
  try {
    memory = {::operator new(std::max<std::size_t>(size, 1), kAlignment),
              [](void* data) { ::operator delete(data, kAlignment); }};
  } catch (const std::bad_alloc&) {
    reason = "mpi: allocate: no memory for " + std::to_string(size) + " bytes; free memory";
  }
  throw_agreed(group.exchange("allocate", reason), group.members(), group.control());
  std::memset(memory.get(), 0, size);
  return SharedMemory(memory, {memory.get(), count, dtype, {}});
}

}  // namespace hsdp::comm
