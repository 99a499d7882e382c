// Writes two snapshots of 1 GiB, a.h5 and b.h5, which differ by rounding noise, into a folder, and
// compares the cost of handing one to the background writer with a plain copy of its bytes.
//
//   ours_snapshot FOLDER
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/snapshot.h"
#include "measurement.h"

namespace {

constexpr std::int64_t kParameterCount = 16;
constexpr std::int64_t kElementCount = std::int64_t{16} << 20;  // 64 MiB each
constexpr int kRounds = 3;

std::vector<hsdp::SnapshotEntry> entries_of(const float* data) {
  std::vector<hsdp::SnapshotEntry> entries;
  for (std::int64_t i = 0; i < kParameterCount; ++i) {
    entries.push_back({.name = "layer" + std::to_string(i),
                       .shape = {4096, kElementCount / 4096},
                       .data = {data + i * kElementCount, kElementCount, hsdp::Dtype::kF32}});
  }
  return entries;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void time_submit(const std::filesystem::path& folder, const float* data,
                 const hsdp::SnapshotInfo& info) {
  constexpr std::size_t kBytes = static_cast<std::size_t>(kParameterCount * kElementCount) * 4;
  const std::vector<hsdp::SnapshotEntry> entries = entries_of(data);
  std::vector<double> submits_us;
  std::vector<double> copies_us;
  for (int round = 0; round < kRounds; ++round) {
    hsdp::SnapshotWriter writer;
    const double start_us = hsdp::bench::now_us();
    writer.submit(folder / "submitted.h5", info, entries);
    submits_us.push_back(hsdp::bench::now_us() - start_us);
    writer.flush();
    // Copies into untouched memory, like the writer.
    const std::unique_ptr<std::byte[]> copy(new std::byte[kBytes]);
    const double copy_start_us = hsdp::bench::now_us();
    std::memcpy(copy.get(), data, kBytes);
    copies_us.push_back(hsdp::bench::now_us() - copy_start_us);
  }
  std::filesystem::remove(folder / "submitted.h5");
  std::printf("value snapshot_submit_us %.0f\n", median(submits_us));
  std::printf("value snapshot_copy_us %.0f\n", median(copies_us));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "ours_snapshot: arguments: expected a folder\n");
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  const std::int64_t count = kParameterCount * kElementCount;
  const auto memory = hsdp::bench::private_memory(count * 4);
  auto* const data = static_cast<float*>(memory.get());
  hsdp::bench::fill_input(data, hsdp::Dtype::kF32, 0, count, 0);
  hsdp::SnapshotInfo info;
  info.id = hsdp::new_snapshot_id();
  info.layout = "full";
  try {
    hsdp::write_snapshot_file(folder / "a.h5", info, entries_of(data));
    time_submit(folder, data, info);
    for (std::int64_t i = 0; i < count; i += 3) data[i] *= 1.0F + 0x1p-22F;
    hsdp::write_snapshot_file(folder / "b.h5", info, entries_of(data));
  } catch (const hsdp::Error& error) {
    std::fprintf(stderr, "ours_snapshot: %s\n", error.what());
    return 1;
  }
  return 0;
}
