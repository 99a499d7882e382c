// Reads arbitrary bytes as a snapshot file. Opening, validating and comparing it must end in a
// result or an hsdp::Error, within bounded memory and time.
//
// The structure's checksum would reject nearly every mutation. So if the last byte is odd, the
// fuzzer recomputes it after the mutation, to reach the code behind that check.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/compare.h"
#include "hsdp/error.h"
#include "hsdp/snapshot/block_checksums.h"
#include "hsdp/snapshot/snapshot_header.h"
#include "hsdp/validate.h"

namespace {

void seal(std::vector<std::byte>& file) {
  if (file.size() < hsdp::kHeaderPrefixBytes) return;
  hsdp::HeaderPrefix prefix;
  std::memcpy(&prefix.json_bytes, file.data() + 12, sizeof prefix.json_bytes);
  prefix.file_bytes = file.size();
  if (prefix.json_bytes > file.size() - hsdp::kHeaderPrefixBytes) return;
  const std::string_view json(reinterpret_cast<const char*>(file.data()) + hsdp::kHeaderPrefixBytes,
                              prefix.json_bytes);
  try {
    const hsdp::SnapshotHeader header = hsdp::decode_json(json, file.size());
    hsdp::RunningChecksum sum;
    for (const hsdp::ByteRange& range :
         hsdp::structure_ranges(header, hsdp::kHeaderPrefixBytes + json.size(), file.size())) {
      sum.add(std::span(file).subspan(range.begin, range.end - range.begin));
    }
    prefix.structure_checksum = sum.value();
  } catch (const hsdp::Error&) {
    // The reader reports the same.
  }
  const hsdp::PrefixBytes bytes = hsdp::encode_prefix(prefix, json);
  std::memcpy(file.data(), bytes.data(), bytes.size());
}

void check(const std::string& path) {
  try {
    const hsdp::Snapshot snapshot = hsdp::Snapshot::open(path);
    hsdp::ValidateOptions validate_options;
    validate_options.thread_count = 1;
    static_cast<void>(hsdp::validate_snapshot(snapshot, validate_options));
    hsdp::CompareOptions compare_options;
    compare_options.thread_count = 1;
    compare_options.detail = true;
    static_cast<void>(hsdp::compare_snapshots(snapshot, snapshot, compare_options));
  } catch (const hsdp::Error&) {
    return;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data, size));
  std::vector<std::byte> file(bytes.begin(), bytes.end() - 1);
  if ((data[size - 1] & 1U) != 0) seal(file);
  static const int memory = ::memfd_create("snapshot_fuzzer", MFD_CLOEXEC);
  if (::ftruncate(memory, 0) != 0 ||
      ::pwrite(memory, file.data(), file.size(), 0) != static_cast<ssize_t>(file.size())) {
    return 0;
  }
  check("/proc/self/fd/" + std::to_string(memory));
  return 0;
}
