// Lists of things that one launch works on, in the arguments of a kernel. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/dtype.h"

namespace hsdp::kernels {

// The work of a launch is cut into units, which a block takes on at once, numbered over all items.
// The last item whose first unit is not after that one.
template <class Item>
[[nodiscard]] HSDP_HOST_DEVICE const Item& item_of(const Item* items, int count,
                                                   std::uint32_t unit) {
  int first = 0;
  while (count > 1) {
    const int half = count / 2;
    if (items[first + half].first_unit <= unit) first += half;
    count -= half;
  }
  return items[first];
}

}  // namespace hsdp::kernels
