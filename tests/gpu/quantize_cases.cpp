#include <memory>
#include <span>

#include "hsdp/kernels/cast_and_pack.h"
#include "kernel_case.h"
#include "quant/quantize.h"

namespace hsdp::gpu {
namespace {

using quant::Code;
using quant::ErrorState;
using quant::GroupFormat;
using quant::GroupMap;
using quant::GroupTile;
using quant::Message;
using quant::MessageLayout;
using quant::MessageRow;
using quant::Quantize;

constexpr GroupFormat kInt4{};
constexpr GroupFormat kInt8{.code = Code::kInt8, .scale_dtype = Dtype::kF32};

template <class T>
Buffer to_device(std::span<const T> values, Stream& stream) {
  Buffer made(kGpu, values.size_bytes());
  copy_bytes(made.data(), values.data(), values.size_bytes(), stream);
  stream.synchronize();
  return made;
}

// One parameter that fills an array, with its map and layouts on host and device.
struct Setup {
  explicit Setup(Arena& arena)
      : count(arena.count(Dtype::kF32) / 4096 * 4096),
        map(std::vector<ParameterRange>{{.count = count}}, kInt4.group_size, 1),
        int4(map, kInt4),
        int8(map, kInt8),
        device_tiles(to_device(map.tiles(), arena.stream())),
        device_int4(to_device(int4.rows(), arena.stream())),
        device_int8(to_device(int8.rows(), arena.stream())) {}
  [[nodiscard]] std::span<const GroupTile> tiles(bool on_device) const {
    if (!on_device) return map.tiles().first(kCompared / quant::kTileElements);
    return {reinterpret_cast<const GroupTile*>(device_tiles.data()), map.tiles().size()};
  }
  [[nodiscard]] Message message(const GroupFormat& format, const std::byte* data,
                                bool on_device) const {
    const bool is_int4 = format.code == Code::kInt4;
    const Buffer& rows = is_int4 ? device_int4 : device_int8;
    return {format, const_cast<std::byte*>(data), 0,
            on_device ? reinterpret_cast<const MessageRow*>(rows.data())
                      : (is_int4 ? int4 : int8).rows().data()};
  }
  [[nodiscard]] std::int64_t message_bytes() const { return int4.cut().count(); }
  // An error state at `data`: codes, followed by scales.
  [[nodiscard]] ErrorState error(const std::byte* data) const {
    auto* const codes = reinterpret_cast<std::int8_t*>(const_cast<std::byte*>(data));
    return {.codes = codes, .scales = reinterpret_cast<float*>(codes + count)};
  }
  [[nodiscard]] std::int64_t error_bytes() const { return count + 4 * map.group_count(); }

  std::int64_t count;
  GroupMap map;
  MessageLayout int4;
  MessageLayout int8;
  Buffer device_tiles;
  Buffer device_int4;
  Buffer device_int8;
};

// Array 0 holds values, or `rows` received messages if that is not 0. Array 1 holds the old error.
// Array 2 receives the message, followed by the new error.
Case quantize_case(Arena& arena, std::shared_ptr<const Setup> setup, int rows, bool feeds_back) {
  const auto arguments = [=](const std::byte* in, const std::byte* error, std::byte* out,
                             bool on_device) {
    Quantize args{.tiles = setup->tiles(on_device), .factor = 0.25F};
    if (rows == 0) args.values = reinterpret_cast<const float*>(in);
    if (rows > 0) {
      args.received = {setup->message(kInt4, in, on_device), setup->message_bytes(), rows};
    }
    args.out = setup->message(kInt4, out, on_device);
    if (feeds_back) {
      args.before = setup->error(error);
      args.after = setup->error(out + setup->message_bytes());
    }
    return args;
  };
  const std::int64_t message = setup->message_bytes();
  const std::int64_t error = feeds_back ? setup->error_bytes() : 0;
  Case made;
  made.name = rows == 0 ? "quantize int4" : "sum " + std::to_string(rows) + " int4, quantize";
  if (feeds_back) made.name += ", int8 error";
  made.bytes =
      static_cast<double>((rows == 0 ? 4 * setup->count : rows * message) + message + 2 * error);
  made.launch = [=, &arena](int set) {
    quantize(arguments(arena.at(set, 0), arena.at(set, 1), arena.at(set, 2), true), arena.stream());
  };
  made.check = [=, &arena](int set) -> std::string {
    std::vector<std::byte> found =
        arena.read(arena.at(set, 2), static_cast<std::size_t>(message + error));
    std::vector<std::byte> expected = found;
    const std::int64_t codes = setup->int4.rows()[0].codes;
    const std::int64_t groups = kCompared / kInt4.group_size;
    const auto clear = [&](std::int64_t begin, std::int64_t bytes) {
      std::fill_n(expected.begin() + begin, bytes, std::byte{0});
    };
    clear(0, 2 * groups);
    clear(codes, kCompared / 2);
    if (feeds_back) {
      clear(message, kCompared);
      clear(message + setup->count, 4 * groups);
    }
    quantize_reference(arguments(arena.host(), arena.host(), expected.data(), false));
    return found == expected ? "" : "the result is wrong";
  };
  return made;
}

Case dequantize_case(Arena& arena, std::shared_ptr<const Setup> setup) {
  const auto arguments = [=](const std::byte* in, std::byte* out, bool on_device) {
    return quant::Dequantize{.tiles = setup->tiles(on_device),
                             .in = {setup->message(kInt4, in, on_device), 0, 1},
                             .values = reinterpret_cast<float*>(out)};
  };
  Case made;
  made.name = "dequantize int4";
  made.bytes = static_cast<double>(setup->message_bytes() + 4 * setup->count);
  made.launch = [=, &arena](int set) {
    dequantize(arguments(arena.at(set, 0), arena.at(set, 2), true), arena.stream());
  };
  made.check = [=, &arena](int set) -> std::string {
    std::vector<std::byte> expected(4 * kCompared);
    dequantize_reference(arguments(arena.host(), expected.data(), false));
    return arena.read(arena.at(set, 2), expected.size()) == expected ? "" : "the result is wrong";
  };
  return made;
}

// Shows what the fused kernel saves: the reads and writes of values between six kernels that decode
// the error, add it, quantize, decode, subtract and code the new error. An addition stands for the
// subtraction.
Case unfused_case(Arena& arena, std::shared_ptr<const Setup> setup, double fused_bytes) {
  const auto memory = std::make_shared<Buffer>(kGpu, static_cast<std::size_t>(8 * setup->count));
  Case made;
  made.name = "the same in six kernels";
  made.bytes = fused_bytes;
  made.launch = [=, &arena](int set) {
    auto* const h = reinterpret_cast<float*>(memory->data());
    float* const other = h + setup->count;
    const std::byte* const values = arena.at(set, 0);
    std::byte* const message = arena.at(set, 2);
    std::byte* const error = message + setup->message_bytes();
    const auto add = [&](const void* first, const float* second, float* out) {
      const StridedView view{first, Dtype::kF32, kGpu, {setup->count}, {}};
      kernels::CastAndPack args;
      args.gradient = &view;
      args.count = setup->count;
      args.add = second;
      args.out = out;
      cast_and_pack(args, arena.stream());
    };
    const auto decode = [&](const GroupFormat& format, const std::byte* from, float* to) {
      quant::dequantize({.tiles = setup->tiles(true),
                         .in = {setup->message(format, from, true), 0, 1},
                         .values = to},
                        arena.stream());
    };
    const auto code = [&](const GroupFormat& format, const float* from, std::byte* to) {
      quant::quantize(
          {.tiles = setup->tiles(true), .values = from, .out = setup->message(format, to, true)},
          arena.stream());
    };
    decode(kInt8, arena.at(set, 1), other);
    add(values, other, h);
    code(kInt4, h, message);
    decode(kInt4, message, other);
    add(h, other, other);
    code(kInt8, other, error);
  };
  made.check = [](int) { return std::string(); };
  return made;
}

}  // namespace

std::vector<Case> quantize_cases(Arena& arena) {
  const auto setup = std::make_shared<const Setup>(arena);
  std::vector<Case> made = {quantize_case(arena, setup, 0, false),
                            quantize_case(arena, setup, 0, true)};
  made.push_back(unfused_case(arena, setup, made.back().bytes));
  made.push_back(quantize_case(arena, setup, 2, true));
  made.push_back(quantize_case(arena, setup, 4, true));
  made.push_back(dequantize_case(arena, setup));
  return made;
}

}  // namespace hsdp::gpu
