#include <algorithm>
#include <vector>

#include "check.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/flag.h"
#include "hsdp/device/in_flight.h"
#include "hsdp/device/scratch.h"
#include "hsdp/error.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/scale_and_cast.h"

namespace hsdp::gpu {
namespace {

constexpr std::int64_t kCount = 100'000;

void double_in_place(const Buffer& buffer, const Stream& stream) {
  kernels::scale_and_cast(
      {.in = buffer.data(), .out = buffer.data(), .count = kCount, .exponent = 1}, stream);
}

// Dividing by 0 makes infinities, which set the flag.
void divide_in_place(const Buffer& buffer, float divisor, const Flag& flag, const Stream& stream) {
  kernels::scale_and_cast({.in = buffer.data(),
                           .out = buffer.data(),
                           .count = kCount,
                           .divisor = divisor,
                           .nonfinite = flag.get()},
                          stream);
}

std::vector<float> read(const Buffer& buffer, const Stream& stream) {
  std::vector<float> values(buffer.size() / sizeof(float));
  copy_bytes(values.data(), buffer.data(), buffer.size(), stream);
  Stream(stream).synchronize();
  return values;
}

Buffer make_ones(const Stream& stream) {
  Buffer buffer(stream.device(), kCount * sizeof(float));
  const std::vector<float> ones(kCount, 1.0F);
  copy_bytes(buffer.data(), ones.data(), buffer.size(), stream);
  Stream(stream).synchronize();
  return buffer;
}

bool all_are(const std::vector<float>& values, float expected) {
  return std::ranges::all_of(values, [expected](float value) { return value == expected; });
}

std::string check_buffer(const Stream& stream) {
  Buffer buffer(stream.device(), kCount * sizeof(float));
  if (!all_are(read(buffer, stream), 0.0F)) return "a new buffer is not zero";
  if (buffer.device() != stream.device()) return "a buffer on another device";
  if (Buffer(stream.device(), 0).data() != nullptr) return "an empty buffer has memory";
  const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
  return address % 256 == 0 ? "" : "a buffer is not aligned";
}

std::string check_no_memory(const Stream& stream) {
  try {
    const Buffer buffer(stream.device(), std::size_t{1} << 50U);
  } catch (const Error& error) {
    const std::string text = error.what();
    return text.find("allocate") != std::string::npos ? "" : "an unclear error: " + text;
  }
  return "a pebibyte was allocated";
}

std::string check_order(Stream stream) {
  const Buffer buffer = make_ones(stream);
  for (int i = 0; i < 20; ++i) {
    stream.run([&] { double_in_place(buffer, stream.inside_task()); });
  }
  return all_are(read(buffer, stream), 1048576.0F) ? "" : "work ran out of order";
}

std::string check_streams_wait(Stream stream) {
  Stream other = Stream::create(stream.device(), "other");
  const Buffer buffer = make_ones(stream);
  for (int i = 0; i < 10; ++i) {
    Stream& now = i % 2 == 0 ? stream : other;
    Stream& next = i % 2 == 0 ? other : stream;
    double_in_place(buffer, now);
    next.wait(now.record());
  }
  const Event last = stream.record();
  last.wait();
  if (!last.complete()) return "an event that was waited for is not complete";
  return all_are(read(buffer, stream), 1024.0F) ? "" : "a stream did not wait for another one";
}

std::string check_host_and_device_wait(Stream stream) {
  Stream host = Stream::host_worker("host");
  const Buffer buffer = make_ones(stream);
  const Flag from_device = make_flag(stream.device());
  const Flag from_host = make_flag(stream.device());
  // Enqueues work on the GPU, the host and the GPU again without waiting in between.
  divide_in_place(buffer, 0.0F, from_device, stream);
  host.wait(stream.record());
  host.run([&] { from_host->store(from_device->load()); });
  stream.wait(host.record());
  kernels::indicate(from_host.get(), reinterpret_cast<float*>(buffer.data()), stream);
  return read(buffer, stream).front() == 1.0F ? "" : "host and device did not wait for each other";
}

std::string check_borrowed(Stream stream) {
  Stream borrowed = Stream::borrow(stream.device(), stream.native_handle());
  Stream legacy = Stream::borrow(stream.device(), nullptr);
  const Buffer buffer = make_ones(stream);
  double_in_place(buffer, borrowed);
  legacy.wait(borrowed.record());
  double_in_place(buffer, legacy);
  stream.wait(legacy.record());
  if (borrowed.native_handle() != stream.native_handle()) return "another stream was borrowed";
  return all_are(read(buffer, stream), 4.0F) ? "" : "a borrowed stream lost the order";
}

std::string check_flag(Stream stream) {
  const Buffer buffer = make_ones(stream);
  const Flag flag = make_flag(stream.device());
  divide_in_place(buffer, 1.0F, flag, stream);
  stream.record().wait();
  if (*flag != 0) return "a flag was set by finite values";
  divide_in_place(buffer, 0.0F, flag, stream);
  stream.record().wait();
  return *flag == 1 ? "" : "a flag was not set by infinities";
}

std::string check_scratch(Stream stream) {
  const Buffer buffer = make_ones(stream);
  for (int i = 0; i < 50; ++i) {
    const Scratch scratch(buffer.size(), stream);
    copy_bytes(scratch.data(), buffer.data(), buffer.size(), stream);
    copy_bytes(buffer.data(), scratch.data(), buffer.size(), stream);
  }
  return all_are(read(buffer, stream), 1.0F) ? "" : "scratch memory went back too early";
}

std::string check_in_flight(Stream stream) {
  InFlight in_flight;
  auto memory = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = memory;
  in_flight.hold(stream.record(), std::move(memory));
  stream.synchronize();
  in_flight.reap();
  return alive.expired() ? "" : "memory is held after its last use";
}

std::string check_error(Stream stream) {
  Stream own = Stream::create(stream.device(), "own");
  own.run([] { throw UsageError("first"); });
  bool ran = false;
  own.run([&ran] { ran = true; });
  if (ran) return "a broken stream ran a task";
  try {
    stream.wait(own.record());
    stream.synchronize();
  } catch (const UsageError&) {
    return {};
  }
  return "a stream waited for a broken one and did not say so";
}

}  // namespace

std::vector<Check> device_checks() {
  return {
      {"buffer: zero, aligned, on its device", check_buffer},
      {"buffer: no memory is an error", check_no_memory},
      {"stream: work runs in order", check_order},
      {"stream: waits for another stream", check_streams_wait},
      {"stream: host and device wait for each other", check_host_and_device_wait},
      {"stream: borrowed ones keep the order", check_borrowed},
      {"flag: set by a kernel, read by the host", check_flag},
      {"scratch: comes and goes in stream order", check_scratch},
      {"in flight: held until the event", check_in_flight},
      {"stream: breaks at the first error", check_error},
  };
}

}  // namespace hsdp::gpu
