#include "hsdp/comm/host/control_reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "hsdp/comm/host/reduce_plan.h"
#include "hsdp/kernels/sum_rows.h"

namespace hsdp::comm {
namespace {

// For numbers, not data: rank 0 relays them from every member to every member.
constexpr std::size_t kMostBytes = 64;

}  // namespace

std::span<const std::byte> control_row(const HostGroup& group, const AllReduce& args) {
  const std::size_t size = args.data.size_in_bytes();
  if (!group.calls_take_bytes() || rounds_on_wire(args) || size > kMostBytes) return {};
  return {static_cast<const std::byte*>(args.data.data), size};
}

void control_all_reduce(const HostGroup& group, const AllReduce& args) {
  struct alignas(kMostBytes) Row {
    std::array<std::byte, kMostBytes> bytes;
  };
  std::vector<Row> rows(static_cast<std::size_t>(group.size()));
  std::vector<const void*> places;
  for (int r = 0; r < group.size(); ++r) {
    const auto bytes = group.bytes_of(r);
    Row& row = rows[static_cast<std::size_t>(r)];
    std::memcpy(row.bytes.data(), bytes.data(), std::min(bytes.size(), row.bytes.size()));
    places.push_back(row.bytes.data());
  }
  void* const out = args.data.data;
  kernels::sum_rows({.spec = sum_spec(args),
                     .rows = places,
                     .outs = {&out, 1},
                     .count = args.data.count,
                     .nonfinite = args.nonfinite});
}

}  // namespace hsdp::comm
