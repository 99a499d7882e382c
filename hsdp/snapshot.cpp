#include "hsdp/snapshot.h"

#include <algorithm>
#include <array>
#include <map>
#include <system_error>

#include "hsdp/error.h"
#include "hsdp/index_check.h"
#include "hsdp/snapshot/atomic_file.h"
#include "hsdp/snapshot/block_checksums.h"
#include "hsdp/snapshot/parameter_reader.h"
#include "hsdp/snapshot/snapshot_file_writer.h"
#include "hsdp/snapshot/snapshot_files.h"

namespace hsdp {
namespace {

constexpr std::size_t kMaxNamedMissing = 8;  // in messages
constexpr const char* kMixedRemedy = "; if ranks are still saving, wait for them; else save again";
constexpr const char* kMissingRemedy =
    "; the folder has to be on a file system that all hosts share";
constexpr const char* kSavingRemedy =
    "; a file is still being written there: call flush() of the Reducer that saves it, on every "
    "rank, and read then; where its process was killed, save again";

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& what) {
  throw SnapshotError("snapshot: " + printable(path.string()) + ": " + what);
}

struct Found {
  std::map<int, std::filesystem::path> files;  // by rank
  std::string remedy;                          // where some are missing and being written
};

Found find_rank_files(const std::filesystem::path& directory) {
  Found found;
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    const int rank = rank_of_file(it->path().filename().string());
    if (rank >= 0) found.files.emplace(rank, it->path());
    if (AtomicFile::is_temporary(it->path())) found.remedy = kSavingRemedy;
  }
  if (error) fail(directory, "cannot read the directory: " + error.message());
  if (found.files.empty()) {
    fail(directory, "holds no snapshot: no rank_00000.h5" + found.remedy);
  }
  return found;
}

void check_complete(const std::filesystem::path& directory, const Found& found, int file_count) {
  std::string missing;
  std::size_t missing_count = 0;
  for (int rank = 0; rank < file_count; ++rank) {
    if (found.files.count(rank) != 0) continue;
    if (++missing_count <= kMaxNamedMissing) {
      missing += (missing_count == 1 ? "" : ", ") + std::to_string(rank);
    }
  }
  if (missing_count != 0) {
    if (missing_count > kMaxNamedMissing) missing += ", ...";
    fail(directory, "incomplete: expected " + std::to_string(file_count) + " files, missing " +
                        std::to_string(missing_count) + " (rank " + missing + ")" +
                        (found.remedy.empty() ? kMissingRemedy : found.remedy));
  }
  if (const auto& [rank, path] = *found.files.rbegin(); rank >= file_count) {
    fail(directory, "mixed: " + path.filename().string() + " is of another run; expected " +
                        std::to_string(file_count) + " files" + kMixedRemedy);
  }
}

std::vector<SnapshotFile> open_directory(const std::filesystem::path& directory) {
  const Found found = find_rank_files(directory);
  std::vector<SnapshotFile> files;
  files.push_back(SnapshotFile::open(found.files.begin()->second));
  check_complete(directory, found, files.front().header().file_count);
  for (auto it = std::next(found.files.begin()); it != found.files.end(); ++it) {
    files.push_back(SnapshotFile::open(it->second));
  }
  for (std::size_t rank = 0; rank < files.size(); ++rank) {
    const int written = files[rank].header().info.rank;
    if (written != static_cast<int>(rank)) {
      files[rank].fail("mixed: the file is of rank " + std::to_string(written));
    }
  }
  return files;
}

std::vector<SnapshotFile> open_single(const std::filesystem::path& path) {
  std::vector<SnapshotFile> files;
  files.push_back(SnapshotFile::open(path));
  const int file_count = files.front().header().file_count;
  if (file_count != 1) {
    files.front().fail("one of " + std::to_string(file_count) +
                       " files: give the directory that holds them all");
  }
  return files;
}

// The first fact in which two files of one snapshot differ, or nothing.
std::string find_difference(const SnapshotHeader& a, const SnapshotHeader& b) {
  const SnapshotInfo& x = a.info;
  const SnapshotInfo& y = b.info;
  if (x.id != y.id) return "id " + printable(x.id) + " and " + printable(y.id);
  if (x.step != y.step) return "step " + std::to_string(x.step) + " and " + std::to_string(y.step);
  if (x.replicate_size != y.replicate_size || x.shard_size != y.shard_size ||
      a.file_count != b.file_count) {
    return "mesh";
  }
  if (x.partial != y.partial) return "partial and result";
  if (x.microbatch_count != y.microbatch_count) return "microbatch count";
  if (x.divide_factor != y.divide_factor) return "divide factor";
  if (x.loss_scale != y.loss_scale) return "loss scale";
  if (x.replica_dtype != y.replica_dtype) return "replica dtype";
  if (x.replica_hop != y.replica_hop) return "replica hop";
  if (x.reduction != y.reduction) return "reduction";
  if (x.layout != y.layout) return "layout";
  if (x.engine != y.engine) return "engine";
  if (a.slices.size() != b.slices.size()) return "number of parameters";
  for (std::size_t i = 0; i < a.slices.size(); ++i) {
    const SnapshotSlice& p = a.slices[i];
    const SnapshotSlice& q = b.slices[i];
    if (p.name != q.name)
      return "parameter '" + printable(p.name) + "' and '" + printable(q.name) + "'";
    if (p.shape != q.shape) return "shape of '" + printable(p.name) + "'";
    if (p.dtype != q.dtype || p.reduce_dtype != q.reduce_dtype || p.data_dtype != q.data_dtype) {
      return "dtypes of '" + printable(p.name) + "'";
    }
  }
  return {};
}

}  // namespace

void Snapshot::Files::check_agreement() const {
  for (const SnapshotFile& file : files) {
    const std::string difference = find_difference(files.front().header(), file.header());
    if (!difference.empty()) {
      fail(path, "mixed: " + files.front().path().filename().string() + " and " +
                     file.path().filename().string() + " differ: " + printable(difference) +
                     kMixedRemedy);
    }
  }
}

void Snapshot::Files::place_slices() {
  const auto per_copy = files.size() / static_cast<std::size_t>(copy_count);
  for (std::size_t copy = 0; copy < static_cast<std::size_t>(copy_count); ++copy) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      std::vector<SlicePlace>& slices = places.emplace_back();
      for (std::size_t file = copy * per_copy; file < (copy + 1) * per_copy; ++file) {
        const SnapshotSlice& slice = files[file].header().slices[i];
        if (slice.count != 0) {
          slices.push_back({slice.offset, slice.offset + slice.count, file});
        }
      }
      std::sort(slices.begin(), slices.end(),
                [](const SlicePlace& x, const SlicePlace& y) { return x.begin < y.begin; });
      std::int64_t covered = 0;
      for (const SlicePlace& slice : slices) {
        if (slice.begin != covered) break;
        covered = slice.end;
      }
      const bool tiles =
          covered == parameters[i].count && (slices.empty() ? 0 : slices.back().end) == covered;
      if (!tiles) {
        fail(path, "the slices of '" + printable(parameters[i].name) + "' in copy " +
                       std::to_string(copy) + " do not tile its " +
                       std::to_string(parameters[i].count) + " elements");
      }
    }
  }
}

Snapshot Snapshot::open(const std::filesystem::path& path) {
  std::error_code error;
  const auto files = std::make_shared<Files>();
  files->path = path;
  files->files =
      std::filesystem::is_directory(path, error) ? open_directory(path) : open_single(path);
  files->check_agreement();
  const SnapshotHeader& first = files->files.front().header();
  for (const SnapshotSlice& slice : first.slices) {
    files->parameters.push_back(
        {slice.name, slice.shape, slice.dtype, slice.reduce_dtype, element_count(slice.shape)});
  }
  files->copy_count = first.info.layout == "full" ? first.file_count : first.info.replicate_size;
  files->place_slices();
  Snapshot snapshot;
  snapshot.files_ = files;
  return snapshot;
}

const SnapshotInfo& Snapshot::info() const { return files_->files.front().header().info; }

const std::vector<SnapshotParameter>& Snapshot::parameters() const { return files_->parameters; }

const std::filesystem::path& Snapshot::path() const { return files_->path; }

int Snapshot::copy_count() const { return files_->copy_count; }

namespace {

template <class Out>
void read_elements(const Snapshot& snapshot, std::size_t parameter, int replica, std::int64_t begin,
                   std::span<Out> out) {
  const SnapshotInfo& info = snapshot.info();
  if (parameter >= snapshot.parameters().size() || replica < 0 || replica >= info.replicate_size ||
      begin < 0 || begin > snapshot.parameters()[parameter].count ||
      static_cast<std::int64_t>(out.size()) > snapshot.parameters()[parameter].count - begin) {
    throw UsageError({.where = "snapshot: read",
                      .expected = "a parameter, replica and elements that the snapshot holds",
                      .got = "elements from " + std::to_string(begin) + " of parameter " +
                             std::to_string(parameter) + " of replica " + std::to_string(replica)});
  }
  // "full": one file, or every rank's; the first rank of the replica stands for it.
  int copy = replica;
  if (info.layout == "full") copy = snapshot.copy_count() == 1 ? 0 : replica * info.shard_size;
  ParameterReader reader(snapshot);
  while (!out.empty()) {
    const StoredElements stored = reader.read(parameter, copy, begin);
    const auto count = std::min(out.size(), static_cast<std::size_t>(stored.count));
    convert(stored, stored_divisor(info), out.first(count));
    out = out.subspan(count);
    begin += static_cast<std::int64_t>(count);
  }
}

}  // namespace

void Snapshot::read(std::size_t parameter, int replica, std::int64_t begin,
                    std::span<float> out) const {
  read_elements(*this, parameter, replica, begin, out);
}

void Snapshot::read(std::size_t parameter, int replica, std::int64_t begin,
                    std::span<double> out) const {
  read_elements(*this, parameter, replica, begin, out);
}

int Snapshot::file_count() const { return static_cast<int>(files_->files.size()); }

namespace {

const SnapshotFile& file_of(const std::vector<SnapshotFile>& files, int number) {
  return files[check_index("snapshot: hop state", "a file below", number, std::ssize(files))];
}

}  // namespace

std::vector<Snapshot::StateArray> Snapshot::hop_state(int file) const {
  std::vector<StateArray> arrays;
  for (const SnapshotSlice& array : file_of(files_->files, file).header().hop_state) {
    arrays.push_back({array.name, array.data_dtype, array.count});
  }
  return arrays;
}

void Snapshot::read_hop_state(int file, std::size_t number, std::span<std::byte> out) const {
  const SnapshotFile& from = file_of(files_->files, file);
  const std::vector<SnapshotSlice>& arrays = from.header().hop_state;
  if (number >= arrays.size() || out.size() != arrays[number].data_bytes()) {
    throw UsageError(
        {.where = "snapshot: hop state",
         .expected =
             "one of " + std::to_string(arrays.size()) + " arrays, and as many bytes as it has",
         .got = "array " + std::to_string(number) + ", " + std::to_string(out.size()) + " bytes"});
  }
  const comm::UniqueFd fd = from.reopen();
  std::vector<std::byte> buffer(kChecksumBlockBytes);
  for (std::size_t block = 0; !out.empty(); ++block) {
    const auto bytes = from.read_block(fd.get(), arrays[number], block, buffer);
    std::ranges::copy(bytes, out.begin());
    out = out.subspan(bytes.size());
  }
}

}  // namespace hsdp
