// How buckets get a staging slot, and leave it.
#include <algorithm>
#include <tuple>

#include "hsdp/reducer/collector.h"

namespace hsdp::reducer {

void Collector::pack_ready(Lock& lock) {
  while (!ready_.empty()) {
    const Work work = ready_.front();
    ready_.pop_front();
    pack_one(lock, work);
  }
}

void Collector::assign_slots() {
  while (!free_slots_.empty() && next_slot_ < order_.size()) {
    const int number = order_[next_slot_];
    const Bucket& bucket = layout_.buckets()[static_cast<std::size_t>(number)];
    ++next_slot_;
    if (!plan_->group(bucket.group).reduces()) continue;
    BucketState& state = states_[static_cast<std::size_t>(number)];
    std::tie(state.slot, state.slot_free) = free_slots_.back();
    free_slots_.pop_back();
    for (const int parameter : state.waiting) {
      const std::vector<Piece>& pieces = pieces_[static_cast<std::size_t>(parameter)];
      const auto piece = std::ranges::find(pieces, number, &Piece::bucket);
      ready_.push_back({parameter, static_cast<int>(piece - pieces.begin())});
    }
    state.waiting.clear();
  }
}

void Collector::launch_complete() {
  while (open_ && next_launch_ < order_.size()) {
    const int number = order_[next_launch_];
    const BucketState& state = states_[static_cast<std::size_t>(number)];
    const Bucket& bucket = layout_.buckets()[static_cast<std::size_t>(number)];
    const bool reduces = plan_->group(bucket.group).reduces();
    if (state.unpacked > 0 || (has_shard_hop_ && reduces && state.slot < 0)) return;
    ++next_launch_;
    if (reduces && state.slot >= 0) ++reducing_;
    pipeline_.launch(number, reduces ? state.slot : kNoSlot, plan_, packs_.record(state.slot));
  }
}

void Collector::slot_free(int slot, const Event& free) {
  Lock lock(mutex_);
  free_slots_.emplace_back(slot, free);
  --reducing_;
  if (open_) assign_slots();
  wake_waiter();
  if (!leaves_packing_to_caller()) pack_ready(lock);
}

}  // namespace hsdp::reducer
