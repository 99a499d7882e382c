#include "hsdp/snapshot/parameter_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hsdp/divide_factors.h"
#include "hsdp/snapshot/block_checksums.h"
#include "hsdp/snapshot/snapshot_files.h"

namespace hsdp {
namespace {

constexpr std::size_t kMaxDescriptors = 64;

template <class Stored>
float widen(Stored x) {
  return to_float(x);
}
double widen(double x) { return x; }

// Divides as the Reducer does: fp32 by fp32(f s), unless the data is f64.
template <class Stored, class Out>
void convert_from(const std::byte* data, double divisor, std::span<Out> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    Stored x;
    std::memcpy(&x, data + i * sizeof x, sizeof x);
    out[i] = static_cast<Out>(widen(x));
  }
  if (divisor == 1.0) return;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if constexpr (sizeof(Stored) == sizeof(double)) {
      Stored x;
      std::memcpy(&x, data + i * sizeof x, sizeof x);
      out[i] = static_cast<Out>(x / divisor);
    } else {
      out[i] = static_cast<float>(out[i]) / static_cast<float>(divisor);
    }
  }
}

template <class Out>
void convert_any(const StoredElements& stored, double divisor, std::span<Out> out) {
  switch (stored.dtype) {
    case Dtype::kBf16:
      return convert_from<Bf16>(stored.data, divisor, out);
    case Dtype::kF16:
      return convert_from<F16>(stored.data, divisor, out);
    case Dtype::kF64:
      return convert_from<double>(stored.data, divisor, out);
    default:
      return convert_from<float>(stored.data, divisor, out);
  }
}

}  // namespace

ParameterReader::ParameterReader(Snapshot snapshot)
    : snapshot_(std::move(snapshot)), buffer_(kChecksumBlockBytes) {}

int ParameterReader::descriptor(std::size_t file) {
  const auto found = descriptors_.find(file);
  if (found != descriptors_.end()) return found->second.get();
  if (descriptors_.size() >= kMaxDescriptors) descriptors_.clear();
  return descriptors_.emplace(file, snapshot_.files_->files[file].reopen()).first->second.get();
}

Dtype ParameterReader::stored_dtype(std::size_t parameter) const {
  return snapshot_.files_->files.front().header().slices[parameter].data_dtype;
}

StoredElements ParameterReader::read(std::size_t parameter, int copy, std::int64_t begin) {
  const Snapshot::Files& files = *snapshot_.files_;
  const auto& places =
      files.places[static_cast<std::size_t>(copy) * files.parameters.size() + parameter];
  const auto place =
      std::upper_bound(places.begin(), places.end(), begin,
                       [](std::int64_t at, const SlicePlace& p) { return at < p.end; });
  const SnapshotFile& file = files.files[place->file];
  const SnapshotSlice& slice = file.header().slices[parameter];
  const std::size_t element_bytes = size_bytes(slice.data_dtype);
  const std::size_t byte = static_cast<std::size_t>(begin - place->begin) * element_bytes;
  const std::size_t block = byte / kChecksumBlockBytes;
  if (bytes_.empty() || parameter != parameter_ || place->file != file_ || block != block_) {
    bytes_ = {};
    bytes_ = file.read_block(descriptor(place->file), slice, block, buffer_);
    parameter_ = parameter;
    file_ = place->file;
    block_ = block;
  }
  const auto rest = bytes_.subspan(byte % kChecksumBlockBytes);
  return {rest.data(), static_cast<std::int64_t>(rest.size() / element_bytes), slice.data_dtype};
}

double stored_divisor(const SnapshotInfo& info) {
  return info.partial ? info.divide_factor * info.loss_scale : 1.0;
}

void convert(const StoredElements& stored, double divisor, std::span<float> out) {
  convert_any(stored, divisor, out);
}

void convert(const StoredElements& stored, double divisor, std::span<double> out) {
  convert_any(stored, divisor, out);
}

}  // namespace hsdp
