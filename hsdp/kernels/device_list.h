// Lists of the items of one launch, passed as kernel arguments. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/dtype.h"

namespace hsdp::kernels {

// A launch is cut into units, numbered over all items; a block takes one unit at a time. Returns
// the item that `unit` belongs to: the last one whose first unit is not after it.
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
