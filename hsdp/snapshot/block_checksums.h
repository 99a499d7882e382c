// XXH3-64 checksums of blocks of 256 KiB, so that any part of a slice can be checked alone and in
// parallel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace hsdp {

constexpr std::size_t kChecksumBlockBytes = std::size_t{256} << 10;

[[nodiscard]] constexpr std::uint64_t checksum_block_count(std::uint64_t data_bytes) {
  return data_bytes / kChecksumBlockBytes + (data_bytes % kChecksumBlockBytes != 0 ? 1 : 0);
}

[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes);
// Appends the checksums of the blocks of `data`, the last of which may be short.
void append_block_checksums(std::span<const std::byte> data, std::vector<std::uint64_t>& table);

// The checksum of bytes that arrive in pieces.
class RunningChecksum {
 public:
  RunningChecksum();
  ~RunningChecksum();
  RunningChecksum(const RunningChecksum&) = delete;
  RunningChecksum& operator=(const RunningChecksum&) = delete;

  void add(std::span<const std::byte> bytes);
  [[nodiscard]] std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hsdp
