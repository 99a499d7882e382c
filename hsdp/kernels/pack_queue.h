// Packs that one launch on a GPU runs together: a launch for each gradient would cost the host more
// than the gradient's bytes cost the GPU [Note: one launch for many gradients].
//
// On the host add() packs at once, on any thread, and there is nothing to launch. On a GPU nothing
// is read or written before launch(); one thread at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/device_pack_list.h"

namespace hsdp::kernels {

class PackQueue {
 public:
  explicit PackQueue(Device device) : device_(device) {}

  // As cast_and_pack(). No two in a queue write the same elements, and none reads what another one
  // writes. The view is copied, its memory is not.
  void add(const CastAndPack& args);
  [[nodiscard]] bool empty() const { return lists_.empty() && strided_.empty(); }
  [[nodiscard]] bool writes(const void* out) const;
  // Whether waiting for more would not make a launch any cheaper.
  [[nodiscard]] bool is_full() const;
  // Inside a task of `stream`. Empty afterwards, also when it throws.
  void launch(const Stream& stream);
  void clear();
  // Of what was added since it was made, what a GPU reads in small pieces as it lies misaligned.
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
