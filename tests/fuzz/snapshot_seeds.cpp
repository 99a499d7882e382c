// Writes small snapshot files into a folder, for the fuzzer to start from. It writes each one
// twice: the last byte tells the fuzzer whether to recompute the checksum after a mutation.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/snapshot.h"

namespace {

using hsdp::Dtype;

void write_seed(const std::filesystem::path& folder, const std::string& name,
                const hsdp::SnapshotInfo& info, const std::vector<hsdp::SnapshotEntry>& entries,
                const std::vector<hsdp::SnapshotState>& hop_state = {}) {
  const std::filesystem::path path = folder / (name + ".h5");
  hsdp::write_snapshot_file(path, info, entries, hop_state);
  std::filesystem::copy_file(path, folder / (name + "_sealed"),
                             std::filesystem::copy_options::overwrite_existing);
  std::ofstream(folder / (name + "_sealed"), std::ios::binary | std::ios::app) << '\1';
  std::ofstream(path, std::ios::binary | std::ios::app) << '\0';
}

void write_seeds(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  const std::vector<float> data{1, -2, 3, 0.5F, 1e-40F, 6};
  const std::vector<std::uint16_t> halves{0x3c00, 0x0001, 0xfbff};
  const std::vector<double> doubles{1.0 / 3, -1e300};
  hsdp::SnapshotInfo info;
  info.id = "0123456789abcdef";
  info.layout = "full";
  std::vector<hsdp::SnapshotEntry> entries(4);
  entries[0] = {"w", {2, 3}, Dtype::kF32, Dtype::kBf16, 0, {data.data(), 6, Dtype::kF32}};
  entries[1] = {"h", {3}, Dtype::kF16, Dtype::kF16, 0, {halves.data(), 3, Dtype::kF16}};
  entries[2] = {"d", {2}, Dtype::kF64, Dtype::kF32, 0, {doubles.data(), 2, Dtype::kF64}};
  entries[3] = {"none", {0}, Dtype::kF32, Dtype::kF32, 0, {nullptr, 0, Dtype::kF32}};
  write_seed(folder, "full", info, entries);
  write_seed(
      folder, "hop_state", info, entries,
      {{"w/r0/o0/values", {data.data(), 6, Dtype::kF32}}, {"steps", {nullptr, 0, Dtype::kI64}}});
  info.layout = "flat";
  info.partial = true;
  info.divide_factor = 3;
  entries.resize(1);
  write_seed(folder, "partial", info, entries);
  write_seed(folder, "empty", info, {});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: snapshot_seeds FOLDER\n";
    return 2;
  }
  try {
    write_seeds(argv[1]);
  } catch (const std::exception& error) {
    std::cerr << "snapshot_seeds: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
