#include "hsdp/kernels/strided_walk.h"

#include <cstdlib>

namespace hsdp::kernels {

StridedWalk::StridedWalk(const StridedView& view) {
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    const std::int64_t extent = view.shape[i];
    const std::int64_t stride = view.strides[i];
    if (extent == 1) continue;
    if (!dimensions_.empty() && dimensions_.back().stride == stride * extent) {
      dimensions_.back().extent *= extent;
      dimensions_.back().stride = stride;
    } else {
      dimensions_.push_back({extent, stride, 1});
    }
  }
  if (dimensions_.empty()) dimensions_.push_back({1, 1, 1});
  for (std::size_t i = dimensions_.size() - 1; i > 0; --i) {
    dimensions_[i - 1].distance = dimensions_[i].distance * dimensions_[i].extent;
  }
}

void StridedWalk::for_each_panel(std::int64_t begin, std::int64_t count, const Visit& visit) const {
  if (count > 0) visit_window(0, {0, begin, begin + count, 0}, visit);
}

void StridedWalk::visit_window(std::size_t level, const Window& window, const Visit& visit) const {
  const Dimension& dimension = dimensions_[level];
  if (level + 1 == dimensions_.size()) {
    Panel panel;
    panel.source = window.source + window.begin * dimension.stride;
    panel.position = window.position;
    panel.columns = window.end - window.begin;
    panel.column_stride = dimension.stride;
    visit(panel);
    return;
  }
  // A partial index at either end, whole ones between.
  std::int64_t first = window.begin / dimension.distance;
  const std::int64_t last = window.end / dimension.distance;  // end of the whole ones, exclusive
  const std::int64_t skipped = window.begin % dimension.distance;
  const std::int64_t rest = window.end % dimension.distance;
  std::int64_t position = window.position;
  const auto below = [&](std::int64_t index, std::int64_t begin, std::int64_t end) {
    visit_window(level + 1, {window.source + index * dimension.stride, begin, end, position},
                 visit);
    position += end - begin;
  };
  if (first == last) {
    below(first, skipped, rest);
    return;
  }
  if (skipped != 0) below(first++, skipped, dimension.distance);
  if (first < last) {
    const Window box{window.source + first * dimension.stride, 0, 0, position};
    visit_box(level, last - first, box, visit);
    position += (last - first) * dimension.distance;
  }
  if (rest != 0) below(last, 0, rest);
}

std::size_t StridedWalk::row_dimension(std::size_t level, std::int64_t extent) const {
  const std::size_t inner = dimensions_.size() - 1;
  std::size_t best = inner - 1;
  std::int64_t best_stride = std::abs(dimensions_[inner].stride);
  for (std::size_t i = level; i < inner; ++i) {
    const std::int64_t stride = std::abs(dimensions_[i].stride);
    const bool single = i == level && extent == 1;
    if (!single && stride != 0 && stride < best_stride) {
      best = i;
      best_stride = stride;
    }
  }
  return best;
}

void StridedWalk::visit_box(std::size_t level, std::int64_t extent, const Window& window,
                            const Visit& visit) const {
  const std::size_t inner = dimensions_.size() - 1;
  const std::size_t row = row_dimension(level, extent);
  const auto extent_of = [&](std::size_t i) { return i == level ? extent : dimensions_[i].extent; };
  Panel panel;
  panel.rows = extent_of(row);
  panel.columns = dimensions_[inner].extent;
  panel.row_stride = dimensions_[row].stride;
  panel.column_stride = dimensions_[inner].stride;
  panel.row_distance = dimensions_[row].distance;
  std::vector<std::int64_t> index(inner, 0);
  while (true) {
    panel.source = window.source;
    panel.position = window.position;
    for (std::size_t i = level; i < inner; ++i) {
      panel.source += index[i] * dimensions_[i].stride;
      panel.position += index[i] * dimensions_[i].distance;
    }
    visit(panel);
    // Count up over the dimensions that are neither rows nor columns.
    std::size_t i = inner;
    while (i-- > level) {
      if (i == row) continue;
      if (++index[i] < extent_of(i)) break;
      index[i] = 0;
    }
    if (i + 1 == level) return;
  }
}

}  // namespace hsdp::kernels
