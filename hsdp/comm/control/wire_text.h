// Bounded encoding of control messages: little-endian integers and length-prefixed strings.
//
// The reader never reads past its input and never allocates more than the input holds; after the
// first bad field ok() is false and every further field reads as zero or empty.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hsdp::comm {

class WireWriter {
 public:
  void u32(std::uint32_t value) { integer(value, 4); }
  void u64(std::uint64_t value) { integer(value, 8); }
  void i32(int value) { integer(static_cast<std::uint32_t>(value), 4); }
  void text(std::string_view value) {
    u32(static_cast<std::uint32_t>(value.size()));
    bytes_.append(value);
  }
  void ranks(const std::vector<int>& values) {
    u32(static_cast<std::uint32_t>(values.size()));
    for (const int value : values) i32(value);
  }
  [[nodiscard]] std::string take() { return std::move(bytes_); }

 private:
  void integer(std::uint64_t value, int byte_count) {
    for (int i = 0; i < byte_count; ++i) bytes_ += static_cast<char>((value >> (8 * i)) & 0xffU);
  }
  std::string bytes_;
};

class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : bytes_(bytes) {}

  std::uint32_t u32() { return static_cast<std::uint32_t>(integer(4)); }
  std::uint64_t u64() { return integer(8); }
  int i32() { return static_cast<int>(u32()); }
  std::string_view text() { return take(u32()); }
  std::vector<int> ranks() {
    std::vector<int> values(count(4));
    for (int& value : values) value = i32();
    return values;
  }
  // A number of items of at least `item_bytes` each that can still follow.
  std::uint32_t count(std::size_t item_bytes) {
    const std::uint32_t n = u32();
    if (n <= bytes_.size() / item_bytes) return n;
    ok_ = false;
    return 0;
  }
  // All fields were there and nothing is left over.
  [[nodiscard]] bool complete() const { return ok_ && bytes_.empty(); }
  [[nodiscard]] bool ok() const { return ok_; }

 private:
  std::string_view take(std::size_t size) {
    if (!ok_ || size > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view head = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return head;
  }
  std::uint64_t integer(std::size_t byte_count) {
    std::uint64_t value = 0;
    unsigned shift = 0;
    for (const char c : take(byte_count)) {
      value |= static_cast<std::uint64_t>(static_cast<unsigned char>(c)) << shift;
      shift += 8;
    }
    return value;
  }

  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace hsdp::comm
