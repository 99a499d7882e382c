// Keeps memory alive while work on a Stream still uses it [Note: memory in flight].
//
// Owns each item until its Event is complete; hold() and reap() release completed items.
// Thread-safe. The destructor releases everything: wait for the streams before destroying an
// InFlight.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hsdp/device/event.h"

namespace hsdp {

class InFlight {
 public:
  void hold(const Event& until, std::shared_ptr<const void> memory) {
    reap();
    if (memory == nullptr || until.complete()) return;
    const std::lock_guard lock(mutex_);
    items_.push_back({until, std::move(memory)});
  }

  void reap() {
    std::vector<Item> done;  // destroyed outside the lock: a deleter may call anything
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < items_.size();) {
      if (!items_[i].until.complete()) {
        ++i;
        continue;
      }
      done.push_back(std::move(items_[i]));
      items_[i] = std::move(items_.back());
      items_.pop_back();
    }
  }

  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return items_.size();
  }

 private:
  struct Item {
    Event until;
    std::shared_ptr<const void> memory;
  };
  mutable std::mutex mutex_;
  std::vector<Item> items_;
};

}  // namespace hsdp
