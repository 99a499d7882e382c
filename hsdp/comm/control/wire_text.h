// Bounded encoding of control messages: little-endian integers, length-prefixed strings, and ranks
// in runs.
//
// The reader never reads past its input and produces at most kMostInRuns ranks from runs. After the
// first invalid field ok() is false, and every later field reads as zero or empty.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace hsdp::comm {

constexpr std::size_t kMostInRuns = std::size_t{1} << 20U;  // per message

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
  // Takes as many bytes as needed, at seven bits each: for values that are mostly small.
  void number(std::uint64_t value) {
    for (; value > 0x7f; value >>= 7U) bytes_ += static_cast<char>((value & 0x7fU) | 0x80U);
    bytes_ += static_cast<char>(value);
  }
  void signed_number(std::int64_t value) {
    const auto bits = static_cast<std::uint64_t>(value);
    number(value < 0 ? (~bits << 1U) | 1U : bits << 1U);
  }
  void short_text(std::string_view value) {
    number(value.size());
    bytes_.append(value);
  }
  // Ascending ranks as runs (first, stride, count): a group of a mesh is one run, of any size.
  void runs(std::span<const int> ranks) {
    std::vector<int> numbers;
    for (std::size_t i = 0; i < ranks.size();) {
      const int stride = i + 1 < ranks.size() ? ranks[i + 1] - ranks[i] : 0;
      std::size_t end = i + 1;
      while (end < ranks.size() && ranks[end] - ranks[end - 1] == stride) ++end;
      numbers.insert(numbers.end(), {ranks[i], stride, static_cast<int>(end - i)});
      i = end;
    }
    number(numbers.size() / 3);
    for (const int part : numbers) number(static_cast<std::uint64_t>(part));
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
  std::uint64_t number() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const std::uint64_t byte = integer(1);
      value |= (byte & 0x7fU) << shift;
      if (shift == 63 && byte > 1) break;  // more than 64 bits
      if (byte <= 0x7f) return ok_ ? value : 0;
    }
    ok_ = false;
    return 0;
  }
  std::int64_t signed_number() {
    const std::uint64_t bits = number();
    return static_cast<std::int64_t>((bits & 1U) != 0 ? ~(bits >> 1U) : bits >> 1U);
  }
  std::string_view short_text() { return take(number()); }
  // A count of items of at least one byte each; fails if they cannot follow or exceed `most`.
  std::size_t short_count(std::size_t most = kMostInRuns) {
    const std::uint64_t n = number();
    if (n <= bytes_.size() && n <= most) return n;
    ok_ = false;
    return 0;
  }
  std::vector<int> runs() {  // ascending
    constexpr std::uint64_t kMostRank = std::numeric_limits<int>::max();
    std::vector<int> ranks;
    for (std::size_t left = short_count(); left > 0; --left) {
      const std::uint64_t first = number();
      const std::uint64_t stride = number();
      const std::uint64_t length = number();
      const bool ascends = (length == 1 || stride > 0) &&
                           (ranks.empty() || first > static_cast<std::uint64_t>(ranks.back()));
      ok_ = ok_ && ascends && length > 0 && length <= ranks_left_ && first <= kMostRank &&
            stride <= kMostRank && first + stride * (length - 1) <= kMostRank;
      if (!ok_) return {};
      ranks_left_ -= length;
      for (std::uint64_t i = 0; i < length; ++i) {
        ranks.push_back(static_cast<int>(first + i * stride));
      }
    }
    return ranks;
  }
  // A count of items of at least `item_bytes` each; fails if they cannot follow.
  std::uint32_t count(std::size_t item_bytes) {
    const std::uint32_t n = u32();
    if (n <= bytes_.size() / item_bytes) return n;
    ok_ = false;
    return 0;
  }
  void fail() { ok_ = false; }
  // Whether all fields were present and nothing is left over.
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
  std::uint64_t ranks_left_ = kMostInRuns;
  bool ok_ = true;
};

}  // namespace hsdp::comm
