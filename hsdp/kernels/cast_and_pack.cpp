#include "hsdp/kernels/cast_and_pack.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "hsdp/error.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/pack_queue.h"
#include "hsdp/kernels/row_pass.h"
#include "hsdp/kernels/strided_walk.h"
#include "hsdp/kernels/transpose.h"

namespace hsdp::kernels {
namespace {

constexpr const char* kCastAndPack = "cast_and_pack";
constexpr std::int64_t kLineBytes = 64;
constexpr std::int64_t kLongRunBytes = 2048;  // longer runs are packed in place
constexpr std::int64_t kTileBytes = 131072;   // fits in an L2 cache
constexpr std::int64_t kTileRowBytes = 2048;  // a column then fills at least one cache line
constexpr std::int64_t kTilePadding = kTileBytes / kTileRowBytes * kLineBytes;

struct alignas(64) Tile {
  std::array<std::byte, kTileBytes + kTilePadding> bytes;
};

// The pass over elements [position, position + count) of the window, from `source` (nullptr: zeros)
// to `out`. Both must outlive it.
RowPass pass_of(const CastAndPack& args, const void* const& source, void* const& out,
                std::int64_t position) {
  RowPass pass;
  if (source != nullptr) {
    pass.rows = std::span(&source, 1);
    pass.row_dtype = args.gradient->dtype;
  }
  if (args.add != nullptr) {
    pass.add = static_cast<const char*>(args.add) +
               position * static_cast<std::int64_t>(size_bytes(args.add_dtype));
    pass.add_dtype = args.add_dtype;
  }
  pass.steps.result_scale = power_of_two(-args.exponent);
  pass.outs = std::span(&out, 1);
  pass.out_dtype = args.out_dtype;
  return pass;
}

void* output_at(const CastAndPack& args, std::int64_t position) {
  return static_cast<char*>(args.out) +
         position * static_cast<std::int64_t>(size_bytes(args.out_dtype));
}

// The first half of a pack with a base: `add` and the gradient, unrounded.
RowPass pass_before_base(const CastAndPack& args, const void* const& source, void* const& sums,
                         std::int64_t position) {
  RowPass pass = pass_of(args, source, sums, position);
  pass.steps = {};
  pass.out_dtype = sum_dtype(args.out_dtype);
  return pass;
}

RowPass pass_onto_base(const CastAndPack& args, const void* const& sums, void* const& out,
                       std::int64_t position) {
  RowPass pass = pass_of(args, nullptr, out, position);
  pass.rows = std::span(&sums, 1);
  pass.row_dtype = pass.add_dtype = sum_dtype(args.out_dtype);
  pass.add = static_cast<const char*>(args.base) +
             position * static_cast<std::int64_t>(size_bytes(pass.add_dtype));
  return pass;
}

// Works in pieces that stay in an L1 cache between the two halves.
void pack_run_with_base(const CastAndPack& args, const std::byte* source, std::int64_t position,
                        std::int64_t count) {
  constexpr std::int64_t kPiece = 2048;
  std::array<double, kPiece> piece;  // NOLINT(*-member-init): written before it is read
  void* const written = piece.data();
  const void* const read = written;
  for (std::int64_t done = 0; done < count; done += kPiece) {
    const void* const from =
        source == nullptr
            ? nullptr
            : source + done * static_cast<std::int64_t>(size_bytes(args.gradient->dtype));
    void* const out = output_at(args, position + done);
    RowPass before = pass_before_base(args, from, written, position + done);
    RowPass onto = pass_onto_base(args, read, out, position + done);
    before.count = onto.count = std::min(kPiece, count - done);
    run(before);
    run(onto);
  }
}

void pack_run(const CastAndPack& args, const void* source, std::int64_t position,
              std::int64_t count) {
  if (args.base != nullptr) {
    return pack_run_with_base(args, static_cast<const std::byte*>(source), position, count);
  }
  void* const out = output_at(args, position);
  RowPass pass = pass_of(args, source, out, position);
  pass.count = count;
  pass.streaming_stores =
      args.streaming_stores &&
      count * static_cast<std::int64_t>(size_bytes(args.out_dtype)) >= kLongRunBytes / 2;
  run(pass);
}

const std::byte* element(const StridedView& view, std::int64_t index) {
  return static_cast<const std::byte*>(view.data) +
         index * static_cast<std::int64_t>(size_bytes(view.dtype));
}

void pack_rows(const CastAndPack& args, const Panel& panel) {
  for (std::int64_t r = 0; r < panel.rows; ++r) {
    pack_run(args, element(*args.gradient, panel.source + r * panel.row_stride),
             panel.position + r * panel.row_distance, panel.columns);
  }
}

// How a panel is cut into tiles, in elements.
struct TileShape {
  TileShape(const Panel& panel, std::int64_t element_bytes) {
    const std::int64_t most = kTileBytes / element_bytes;
    const std::int64_t line = kLineBytes / element_bytes;
    columns = std::min(panel.columns, panel.rows == 1 ? most : kTileRowBytes / element_bytes);
    one_run = columns == panel.columns && (panel.row_distance == columns || panel.rows == 1);
    // Rows a power of two apart would compete for a few cache sets.
    stride = !one_run && columns * element_bytes == kTileRowBytes ? columns + line : columns;
    rows = most / columns;
    if (rows > line) rows -= rows % line;
  }

  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;
  bool one_run;  // a tile is contiguous in the output
};

// Gathers the panel tile by tile and packs each tile.
void pack_panel(const CastAndPack& args, const Panel& panel) {
  const StridedView& view = *args.gradient;
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(view.dtype));
  if (panel.column_stride == 1 && panel.columns * element_bytes >= kLongRunBytes) {
    pack_rows(args, panel);
    return;
  }
  thread_local const auto tile = std::make_unique<Tile>();
  const TileShape shape(panel, element_bytes);
  for (std::int64_t c = 0; c < panel.columns; c += shape.columns) {
    for (std::int64_t r = 0; r < panel.rows; r += shape.rows) {
      const std::int64_t rows = std::min(shape.rows, panel.rows - r);
      const std::int64_t columns = std::min(shape.columns, panel.columns - c);
      const std::int64_t source = panel.source + r * panel.row_stride + c * panel.column_stride;
      gather({element(view, source), rows, columns, panel.row_stride, panel.column_stride,
              shape.stride, size_bytes(view.dtype)},
             tile->bytes.data());
      const std::int64_t position = panel.position + r * panel.row_distance + c;
      if (shape.one_run) {
        pack_run(args, tile->bytes.data(), position, rows * columns);
        continue;
      }
      for (std::int64_t k = 0; k < rows; ++k) {
        pack_run(args, tile->bytes.data() + k * shape.stride * element_bytes,
                 position + k * panel.row_distance, columns);
      }
    }
  }
}

bool is_copy(const CastAndPack& args) {
  return args.add == nullptr && args.base == nullptr && args.exponent == 0 &&
         !args.streaming_stores && args.gradient->dtype == args.out_dtype;
}

std::int64_t offset_of(const StridedView& view, std::int64_t index) {
  std::int64_t offset = 0;
  for (std::size_t i = view.shape.size(); i-- > 0;) {
    offset += index % view.shape[i] * view.strides[i];
    index /= view.shape[i];
  }
  return offset;
}

}  // namespace

void check(const CastAndPack& args) {
  require_gradient_dtype(args.out_dtype, kCastAndPack, "output dtype");
  if (args.add != nullptr) require_gradient_dtype(args.add_dtype, kCastAndPack, "added dtype");
  if (args.count < 0 || args.begin < 0) {
    throw UsageError({.where = std::string(kCastAndPack),
                      .expected = "a range of elements from 0 up",
                      .got = std::to_string(args.count) + " from " + std::to_string(args.begin)});
  }
  static_cast<void>(checked_power_of_two(-args.exponent, kCastAndPack));
  const Dtype added = args.add != nullptr ? args.add_dtype : args.out_dtype;
  require_one_width(args.out_dtype, added, {args.exponent}, kCastAndPack);
  if (args.gradient == nullptr) return;
  const StridedView& gradient = *args.gradient;
  require_gradient_dtype(gradient.dtype, kCastAndPack, "gradient dtype");
  require_one_width(args.out_dtype, gradient.dtype, {}, kCastAndPack);
  if (!gradient.strides.empty() && gradient.strides.size() != gradient.shape.size()) {
    throw UsageError({.where = std::string(kCastAndPack),
                      .expected = "one stride for each dimension of " + to_string(gradient.shape),
                      .got = std::to_string(gradient.strides.size())});
  }
  if (args.begin > gradient.count() || args.count > gradient.count() - args.begin) {
    throw UsageError({.where = std::string(kCastAndPack),
                      .expected = "a range inside the gradient's " +
                                  std::to_string(gradient.count()) + " elements",
                      .got = std::to_string(args.count) + " from " + std::to_string(args.begin)});
  }
}

void cast_and_pack(const CastAndPack& args) {
  check(args);
  if (args.count == 0) return;
  if (args.gradient == nullptr) {
    pack_run(args, nullptr, 0, args.count);
    return;
  }
  const StridedView& gradient = *args.gradient;
  if (!gradient.is_contiguous()) {
    StridedWalk(gradient).for_each_panel(args.begin, args.count,
                                         [&](const Panel& panel) { pack_panel(args, panel); });
    return;
  }
  const std::byte* const source = element(gradient, args.begin);
  if (!is_copy(args)) {
    pack_run(args, source, 0, args.count);
  } else if (source != args.out) {
    std::memcpy(args.out, source,
                static_cast<std::size_t>(args.count) * size_bytes(args.out_dtype));
  }
}

void cast_and_pack(const CastAndPack& args, const Stream& stream) {
  PackQueue one(stream.device());
  one.add(args);
  one.launch(stream);
}

void require_packable(const StridedView& gradient) {
  if (gradient.device.type == DeviceType::kHost) return;
  require_alignment(gradient.data, gradient.dtype);
  if (!gradient.is_contiguous()) require_dimensions(StridedWalk(gradient).dimensions().size());
}

void cast_and_pack_reference(const CastAndPack& args) {
  check(args);
  for (std::int64_t i = 0; i < args.count; ++i) {
    const void* source = nullptr;
    if (args.gradient != nullptr) {
      const StridedView& view = *args.gradient;
      const std::int64_t index = args.begin + i;
      source = element(view, view.strides.empty() ? index : offset_of(view, index));
    }
    void* const out = output_at(args, i);
    RowPass pass = pass_of(args, source, out, i);
    double sum = 0.0;  // or an f32
    void* const written = &sum;
    const void* const read = &sum;
    if (args.base != nullptr) {
      RowPass before = pass_before_base(args, source, written, i);
      before.count = 1;
      run_scalar(before);
      pass = pass_onto_base(args, read, out, i);
    }
    pass.count = 1;
    run_scalar(pass);
  }
}

}  // namespace hsdp::kernels
