// Cuts a window of a strided tensor into two-dimensional panels. Internal to hsdp/kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "hsdp/tensor_view.h"

namespace hsdp::kernels {

// Element (r, c) lies at source + r * row_stride + c * column_stride, and is element position + r *
// row_distance + c of the window. All in elements; `source` counts from the view's data.
struct Panel {
  std::int64_t source = 0;
  std::int64_t position = 0;
  std::int64_t rows = 1;
  std::int64_t columns = 1;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
  std::int64_t row_distance = 0;
};

// Merges the view's dimensions where one stride covers them. Columns run along the last dimension,
// rows along the one with the smallest stride, so that whole cache lines are used.
class StridedWalk {
 public:
  explicit StridedWalk(const StridedView& view);

  struct Dimension {
    std::int64_t extent = 1;
    std::int64_t stride = 1;
    std::int64_t distance = 1;  // from one index to the next, in logical order
  };
  // At least one, outermost first.
  [[nodiscard]] const std::vector<Dimension>& dimensions() const { return dimensions_; }

  // Calls `visit` with disjoint panels that cover elements [begin, begin + count) in logical order.
  void for_each_panel(std::int64_t begin, std::int64_t count,
                      const std::function<void(const Panel&)>& visit) const;

 private:
  struct Window {  // elements [begin, end) below one index of the outer dimensions
    std::int64_t source = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t position = 0;
  };
  using Visit = std::function<void(const Panel&)>;

  void visit_window(std::size_t level, const Window& window, const Visit& visit) const;
  void visit_box(std::size_t level, std::int64_t extent, const Window& window,
                 const Visit& visit) const;
  [[nodiscard]] std::size_t row_dimension(std::size_t level, std::int64_t extent) const;

  std::vector<Dimension> dimensions_;
};

}  // namespace hsdp::kernels
