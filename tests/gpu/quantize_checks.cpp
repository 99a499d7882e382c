#include <cstring>

#include "check.h"
#include "device_row.h"
#include "hsdp/device/flag.h"
#include "quantize_setting.h"
#include "quantized_memory.h"

namespace hsdp::gpu {
namespace {

using quant::ErrorMemory;
using quant::ErrorState;
using quant::GroupFormat;
using quant::Guarded;
using quant::MessageLayout;
using quant::Quantize;
using quant::Setting;

// A copy of some elements on the device, `offset` elements after an aligned address.
template <class T>
class DeviceCopy {
 public:
  DeviceCopy(const T* from, std::size_t count, std::size_t offset, const Stream& stream)
      : size_(count * sizeof(T)), bytes_(size_, offset * sizeof(T), stream) {
    if (count > 0) std::memcpy(bytes_.host(), from, size_);
    bytes_.upload();
  }
  DeviceCopy(Guarded<T>& from, std::size_t offset, const Stream& stream)
      : DeviceCopy(from.data(), from.size(), offset, stream) {}

  [[nodiscard]] T* data() { return reinterpret_cast<T*>(bytes_.data()); }
  // Copies the elements back to the host. Returns what is wrong with the guards, or nothing.
  [[nodiscard]] std::string copy_to(T* to) {
    const std::string found = bytes_.download();
    if (size_ > 0) std::memcpy(to, bytes_.host(), size_);
    return found;
  }

 private:
  std::size_t size_;
  GuardedBytes bytes_;
};

template <class T>
DeviceCopy<T> on_device(std::span<const T> values, const Stream& stream) {
  return {values.data(), values.size(), 0, stream};
}

struct DeviceError {
  DeviceError(ErrorMemory& from, std::mt19937& random, const Stream& stream)
      : kind(from.kind),
        codes(from.codes, random() % 16, stream),
        scales(from.scales, random() % 4, stream),
        values(from.values, random() % 4, stream) {}
  [[nodiscard]] ErrorState state() {
    if (kind == quant::ErrorKind::kInt8) return {.codes = codes.data(), .scales = scales.data()};
    if (kind == quant::ErrorKind::kF32) return {.values = values.data()};
    return {};
  }
  [[nodiscard]] std::string copy_to(ErrorMemory& to) {
    return codes.copy_to(to.codes.data()) + scales.copy_to(to.scales.data()) +
           values.copy_to(to.values.data());
  }

  quant::ErrorKind kind;
  DeviceCopy<std::int8_t> codes;
  DeviceCopy<float> scales;
  DeviceCopy<float> values;
};

std::string difference(ErrorMemory& found, ErrorMemory& expected) {
  return quant::difference(found.codes, expected.codes, "error code") +
         quant::difference(found.scales, expected.scales, "error scale") +
         quant::difference(found.values, expected.values, "error");
}

std::string difference(const std::vector<quant::TileFigures>& found,
                       const std::vector<quant::TileFigures>& expected) {
  for (std::size_t t = 0; t < found.size(); ++t) {
    const double wanted = expected[t].wanted;
    if (!std::isfinite(wanted) || wanted < 1e-30) continue;  // fp32 products overflow or underflow
    if (std::abs(found[t].wanted - wanted) > 1e-4 * wanted ||
        std::abs(found[t].missed - expected[t].missed) > 1e-4 * wanted) {
      return "figures of tile " + std::to_string(t);
    }
  }
  return {};
}

std::string to_text(const Setting& setting) {
  return " with " + std::string(name(setting.format.code)) + " in " +
         std::to_string(setting.format.group_size) + ", scales " +
         std::string(hsdp::name(setting.format.scale_dtype)) + ", error " +
         std::to_string(static_cast<int>(setting.kind)) + (setting.has_dither ? ", dithered" : "");
}

// Compares one call on host and GPU. `args` is for the host; `on_gpu` has device tiles and sources.
std::string check_call(Quantize args, Quantize on_gpu, const GroupFormat& format,
                       const quant::GroupMap& map, ErrorMemory& before, std::mt19937& random,
                       const Stream& stream) {
  const bool in_place = random() % 2 == 0;
  const MessageLayout layout(map, format);
  const auto size = static_cast<std::size_t>(layout.cut().count());
  Guarded<std::byte> expected(size);
  ErrorMemory error = before;
  std::vector<quant::TileFigures> figures(args.tiles.size());
  std::atomic<std::uint32_t> flag = 0;
  args.before = before.state();
  args.after = error.state();
  args.out = {format, expected.data(), 0, layout.rows().data()};
  args.figures = figures.data();
  args.nonfinite = &flag;

  Guarded<std::byte> found(size);
  DeviceCopy<std::byte> message(found, 0, stream);
  auto rows = on_device(layout.rows(), stream);
  DeviceError device_before(before, random, stream);
  DeviceError device_after(before, random, stream);
  DeviceCopy<quant::TileFigures> device_figures(figures.data(), figures.size(), 0, stream);
  const Flag device_flag = make_flag(stream.device());
  on_gpu.before = in_place ? device_after.state() : device_before.state();
  on_gpu.after = device_after.state();
  on_gpu.out = {format, message.data(), 0, rows.data()};
  on_gpu.figures = device_figures.data();
  on_gpu.nonfinite = device_flag.get();

  quantize_reference(args);
  quantize(on_gpu, stream);
  ErrorMemory got = before;
  std::vector<quant::TileFigures> figures_got(figures.size());
  const std::string guards = message.copy_to(found.data()) + device_after.copy_to(got) +
                             device_figures.copy_to(figures_got.data());
  if (!guards.empty()) return guards;
  if (*device_flag != flag) return "the non-finite flags differ";
  return quant::message_difference(found, expected, format) + difference(got, error) +
         difference(figures_got, figures);
}

std::string check_values(Setting& setting, std::mt19937& random, const Stream& stream) {
  Guarded<float> values(static_cast<std::size_t>(setting.span));
  const auto kind = static_cast<unsigned>(random() % 5);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = quant::some_value(random, kind);
  GroupFormat format = setting.format;
  if (random() % 8 == 0) {
    format.code = quant::Code::kBf16;
    setting.kind = quant::ErrorKind::kNone;
  }
  ErrorMemory before(setting.map, setting.kind);
  fill_random(before, random);
  DeviceCopy<float> device_values(values, random() % 4, stream);
  auto tiles = on_device(setting.map.tiles(), stream);
  Quantize args{.tiles = setting.map.tiles(),
                .group_size = format.group_size,
                .values = values.data(),
                .factor = 1.0F / 3.0F,
                .beta = setting.beta,
                .dither = setting.has_dither ? &setting.dither : nullptr};
  Quantize on_gpu = args;
  on_gpu.tiles = {tiles.data(), args.tiles.size()};
  on_gpu.values = device_values.data();
  return check_call(args, on_gpu, format, setting.map, before, random, stream);
}

// Checks quantizing the sum of the messages that an owner receives.
std::string check_sums(Setting& setting, std::mt19937& random, const Stream& stream) {
  const quant::GroupMap& map = setting.map;
  const int owner = static_cast<int>(random() % static_cast<unsigned>(map.owners()));
  const MessageLayout layout(map, setting.format);
  Guarded<float> values(static_cast<std::size_t>(setting.span));
  const auto kind = static_cast<unsigned>(random() % 5);
  const int count = random() % 16 == 0 ? 100 : 1 + static_cast<int>(random() % 5);
  const std::int64_t size = layout.cut().count();
  Guarded<std::byte> sent(static_cast<std::size_t>(count * size));
  quant::ReceivedMessages received{
      {setting.format, sent.data(), 0, layout.rows().data()}, size, count};
  for (int r = 0; r < count; ++r) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = quant::some_value(random, kind);
    quant::quantize_reference({.tiles = map.tiles(),
                               .group_size = setting.format.group_size,
                               .values = values.data(),
                               .out = received.at(r)});
  }
  DeviceCopy<std::byte> device_sent(sent, 0, stream);
  auto rows = on_device(layout.rows(), stream);
  received.first.begin = layout.cut().begin(owner);  // an owner receives only its row
  received.first.data += received.first.begin;
  GroupFormat format = setting.format;
  format.code = static_cast<quant::Code>(random() % 3);
  if (format.code == quant::Code::kBf16) setting.kind = quant::ErrorKind::kNone;
  ErrorMemory before(map, setting.kind);
  fill_random(before, random);
  auto tiles = on_device(map.tiles(owner), stream);
  Quantize args{.tiles = map.tiles(owner),
                .group_size = format.group_size,
                .received = received,
                .beta = setting.beta,
                .dither = setting.kind == quant::ErrorKind::kInt8 && setting.has_dither
                              ? &setting.dither
                              : nullptr};
  Quantize on_gpu = args;
  on_gpu.tiles = {tiles.data(), args.tiles.size()};
  on_gpu.received.first.data = device_sent.data() + received.first.begin;
  on_gpu.received.first.rows = rows.data();
  return check_call(args, on_gpu, format, map, before, random, stream);
}

// Checks decoding one message, or the sum of several.
std::string check_back(Setting& setting, std::mt19937& random, const Stream& stream) {
  GroupFormat format = setting.format;
  format.code = static_cast<quant::Code>(random() % 3);
  const int count = format.code == quant::Code::kBf16 ? 1 : 1 + static_cast<int>(random() % 5);
  const MessageLayout layout(setting.map, format);
  const std::int64_t size = layout.cut().count();
  Guarded<std::byte> message(static_cast<std::size_t>(count * size));
  for (std::size_t i = 0; i < message.size(); ++i) {  // any bytes are a valid message
    message[i] = static_cast<std::byte>(random());
  }
  const auto before = static_cast<std::int64_t>(random() % 4);  // elements that must not change
  Guarded<float> found(static_cast<std::size_t>(before + setting.span));
  Guarded<float> expected(found.size());
  DeviceCopy<std::byte> device_message(message, 0, stream);
  DeviceCopy<float> device_values(found, random() % 4, stream);
  auto rows = on_device(layout.rows(), stream);
  auto tiles = on_device(setting.map.tiles(), stream);
  std::atomic<std::uint32_t> flag = 0;
  const Flag device_flag = make_flag(stream.device());
  quant::dequantize_reference(
      {.tiles = setting.map.tiles(),
       .group_size = format.group_size,
       .in = {{format, message.data(), 0, layout.rows().data()}, size, count},
       .values = expected.data(),
       .begin = -before,
       .nonfinite = &flag});
  quant::dequantize({.tiles = {tiles.data(), setting.map.tiles().size()},
                     .group_size = format.group_size,
                     .in = {{format, device_message.data(), 0, rows.data()}, size, count},
                     .values = device_values.data(),
                     .begin = -before,
                     .nonfinite = device_flag.get()},
                    stream);
  const std::string guards = device_values.copy_to(found.data());
  if (!guards.empty()) return guards;
  if (*device_flag != flag) return "the non-finite flags differ";
  return quant::difference(found, expected, "element");
}

Check made(std::string name, int rounds,
           std::string (*check)(Setting&, std::mt19937&, const Stream&)) {
  return {std::move(name), [rounds, check](const Stream& stream) {
            std::mt19937 random(1);
            for (int round = 0; round < rounds; ++round) {
              Setting setting(random);
              const std::string found = check(setting, random, stream);
              if (!found.empty()) return found + to_text(setting);
            }
            return std::string();
          }};
}

}  // namespace

std::vector<Check> quantize_checks(Effort effort) {
  const int rounds = effort == Effort::kFull ? 2000 : 200;
  return {
      made("quantize: values", rounds, check_values),
      made("quantize: sums of received messages", rounds, check_sums),
      made("dequantize: any messages", rounds, check_back),
  };
}

}  // namespace hsdp::gpu
