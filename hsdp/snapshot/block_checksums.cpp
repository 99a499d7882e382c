#include "hsdp/snapshot/block_checksums.h"

#include <algorithm>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace hsdp {

struct RunningChecksum::State {
  XXH3_state_t xxh3;
};

std::uint64_t checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

void append_block_checksums(std::span<const std::byte> data, std::vector<std::uint64_t>& table) {
  for (std::size_t begin = 0; begin < data.size(); begin += kChecksumBlockBytes) {
    table.push_back(
        checksum(data.subspan(begin, std::min(kChecksumBlockBytes, data.size() - begin))));
  }
}

RunningChecksum::RunningChecksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh3);
}

RunningChecksum::~RunningChecksum() = default;

void RunningChecksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

std::uint64_t RunningChecksum::value() const { return XXH3_64bits_digest(&state_->xxh3); }

}  // namespace hsdp
