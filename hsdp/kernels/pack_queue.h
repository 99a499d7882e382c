// Collects packs that one GPU launch runs together: launching each gradient alone would cost the
// host more than packing it costs the GPU [Note: one launch for many gradients].
//
// On the host add() packs immediately, on any thread, and launch() has nothing to do. On a GPU
// nothing is read or written before launch(), and only one thread at a time may use the queue.
#pragma once

#include <cstdint>
#include <vector>

#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/device_pack_list.h"

namespace hsdp::kernels {

class PackQueue {
 public:
  explicit PackQueue(Device device) : device_(device) {}

  // Takes the arguments of cast_and_pack(). Packs in a queue must not write the same elements or
  // read what another writes. Copies the view, not its memory.
  void add(const CastAndPack& args);
  [[nodiscard]] bool empty() const { return lists_.empty() && strided_.empty(); }
  [[nodiscard]] bool writes(const void* out) const;
  // Whether waiting for more packs would no longer make a launch cheaper.
  [[nodiscard]] bool is_full() const;
  // Runs inside a task of `stream`. Leaves the queue empty, even when it throws.
  void launch(const Stream& stream);
  void clear();
  // How many of all bytes added so far a GPU reads in small accesses because they are misaligned.
  [[nodiscard]] std::int64_t misaligned_bytes() const { return misaligned_bytes_; }

 private:
  struct List {
    PackKind kind;
    std::vector<PackItem> items;
  };
  struct Strided {
    StridedView gradient;
    CastAndPack args;  // without the gradient
  };
  [[nodiscard]] std::vector<PackItem>& items_of(const PackKind& kind);

  Device device_;
  std::vector<List> lists_;
  std::vector<Strided> strided_;
  std::int64_t waiting_bytes_ = 0;
  std::int64_t misaligned_bytes_ = 0;
};

}  // namespace hsdp::kernels
