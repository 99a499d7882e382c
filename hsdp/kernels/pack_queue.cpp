#include "hsdp/kernels/pack_queue.h"

#include <algorithm>
#include <span>
#include <utility>

#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/row_pass.h"

namespace hsdp::kernels {
namespace {

// A GPU takes longer to pack these than the host takes to launch.
constexpr std::int64_t kFullBytes = std::int64_t{32} << 20;
constexpr std::int64_t kMostElements = std::int64_t{1} << 30;  // per item

const void* at(const void* data, std::int64_t index, Dtype dtype) {
  return data == nullptr ? nullptr : at_element(data, index, dtype);
}

}  // namespace

void PackQueue::add(const CastAndPack& args) {
  if (device_.type == DeviceType::kHost) {
    cast_and_pack(args);
    return;
  }
  check(args);
  if (args.count == 0) return;
  const StridedView* const gradient = args.gradient;
  if (gradient != nullptr && !gradient->is_contiguous()) {
    strided_.push_back({*gradient, args});
    waiting_bytes_ += args.count * gradient_bytes(args.out_dtype);
    return;
  }
  const Dtype dtype = gradient != nullptr ? gradient->dtype : args.out_dtype;
  const void* const data = gradient != nullptr ? at(gradient->data, args.begin, dtype) : nullptr;
  require_alignment(data, dtype);
  require_alignment(args.add, args.add_dtype);
  require_alignment(args.base, sum_dtype(args.out_dtype));
  require_alignment(args.out, args.out_dtype);
  waiting_bytes_ += args.count * gradient_bytes(args.out_dtype);
  const auto misaligned = [&args](const void* row, Dtype row_dtype) {
    return kernels::misaligned_bytes(row, row_dtype, args.out, args.out_dtype, args.count);
  };
  misaligned_bytes_ += misaligned(data, dtype) + misaligned(args.add, args.add_dtype) +
                       misaligned(args.base, sum_dtype(args.out_dtype));
  std::vector<PackItem>& items = items_of({.dtype = dtype,
                                           .add_dtype = args.add_dtype,
                                           .out_dtype = args.out_dtype,
                                           .scale = power_of_two(-args.exponent)});
  for (std::int64_t done = 0; done < args.count; done += kMostElements) {
    items.push_back(
        {.gradient = at(data, done, dtype),
         .add = at(args.add, done, args.add_dtype),
         .base = at(args.base, done, sum_dtype(args.out_dtype)),
         .out = at_element(args.out, done, args.out_dtype),
         .count = static_cast<std::uint32_t>(std::min(kMostElements, args.count - done))});
  }
}

std::vector<PackItem>& PackQueue::items_of(const PackKind& kind) {
  const auto found = std::ranges::find(lists_, kind, &List::kind);
  if (found != lists_.end()) return found->items;
  return lists_.emplace_back(List{kind, {}}).items;
}

bool PackQueue::writes(const void* out) const {
  const auto writes_it = [out](const auto& one) { return one.out == out; };
  return std::ranges::any_of(
             lists_,
             [&](const List& list) { return std::ranges::any_of(list.items, writes_it); }) ||
         std::ranges::any_of(strided_, writes_it, &Strided::args);
}

bool PackQueue::is_full() const {
  const auto fills_launch = [](const List& list) { return list.items.size() >= kMostPackItems; };
  return waiting_bytes_ >= kFullBytes || std::ranges::any_of(lists_, fills_launch);
}

void PackQueue::launch(const Stream& stream) {
  if (empty()) return;
  const std::vector<List> lists = std::exchange(lists_, {});
  const std::vector<Strided> strided = std::exchange(strided_, {});
  clear();
  for (const List& list : lists) {
    for (std::span<const PackItem> items = list.items; !items.empty();) {
      const std::size_t count = std::min<std::size_t>(items.size(), kMostPackItems);
      pack_list_on_device(list.kind, items.first(count), stream);
      items = items.subspan(count);
    }
  }
  for (const Strided& one : strided) {
    CastAndPack args = one.args;
    args.gradient = &one.gradient;
    pack_on_device(args, stream);
  }
}

void PackQueue::clear() {
  lists_.clear();
  strided_.clear();
  waiting_bytes_ = 0;
}

}  // namespace hsdp::kernels
