#include "hsdp/snapshot/hdf5_structure.h"

#include <hdf5.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "hsdp/error.h"
#include "hsdp/snapshot.h"

namespace hsdp {
namespace {

// The gate, and the thread inside HDF5: the library is not thread-safe.
struct Entrance {
  std::mutex gate_mutex;
  Hdf5Gate gate;
  std::mutex hdf5_mutex;
};

Entrance& entrance() {
  static auto* const one = new Entrance;  // outlives static objects
  return *one;
}

[[noreturn]] void fail(const char* what) {
  throw SnapshotError(std::string("snapshot: HDF5 could not ") + what);
}

// Owns one HDF5 identifier.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Handle(hid_t id, Close closer, const char* what) : id_(id), close_(closer) {
    if (id < 0) fail(what);
  }
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Handle& operator=(Handle&&) = delete;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (id_ >= 0) close_(id_);
  }
  [[nodiscard]] hid_t get() const { return id_; }
  void close(const char* what) {
    if (close_(std::exchange(id_, -1)) < 0) fail(what);
  }

 private:
  hid_t id_;
  Close close_;
};

void check(herr_t status, const char* what) {
  if (status < 0) fail(what);
}

Handle property_list(hid_t kind) { return {H5Pcreate(kind), H5Pclose, "create a property list"}; }

// An HDF5 description of a 16-bit float: HDF5 readers convert it to float32.
Handle float16_type(std::size_t exponent_bits, std::size_t bias) {
  constexpr const char* kWhat = "make a 16-bit float type";
  const std::size_t mantissa_bits = 15 - exponent_bits;
  Handle type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose, kWhat);
  check(H5Tset_fields(type.get(), 15, mantissa_bits, exponent_bits, 0, mantissa_bits), kWhat);
  check(H5Tset_precision(type.get(), 16), kWhat);
  check(H5Tset_size(type.get(), 2), kWhat);
  check(H5Tset_ebias(type.get(), bias), kWhat);
  return type;
}

Handle data_type(Dtype dtype) {
  if (dtype == Dtype::kBf16) return float16_type(8, 127);
  if (dtype == Dtype::kF16) return float16_type(5, 15);
  const hid_t type = dtype == Dtype::kF64   ? H5T_IEEE_F64LE
                     : dtype == Dtype::kI64 ? H5T_STD_I64LE
                     : dtype == Dtype::kU8  ? H5T_STD_U8LE
                                            : H5T_IEEE_F32LE;
  return {H5Tcopy(type), H5Tclose, "copy a type"};
}

void write_attribute(hid_t object, const char* key, hid_t type, hid_t space, const void* value) {
  Handle attribute(H5Acreate2(object, key, type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
                   "create an attribute");
  check(H5Awrite(attribute.get(), type, value), "write an attribute");
}

void write_text(hid_t object, const char* key, std::string_view text) {
  Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "copy a type");
  check(H5Tset_size(type.get(), text.size() + 1), "size a text");
  check(H5Tset_cset(type.get(), H5T_CSET_UTF8), "mark a text as UTF-8");
  Handle space(H5Screate(H5S_SCALAR), H5Sclose, "create a scalar");
  write_attribute(object, key, type.get(), space.get(), std::string(text).c_str());
}

void write_whole(hid_t object, const char* key, std::int64_t value) {
  Handle space(H5Screate(H5S_SCALAR), H5Sclose, "create a scalar");
  write_attribute(object, key, H5T_STD_I64LE, space.get(), &value);
}

void write_number(hid_t object, const char* key, double value) {
  Handle space(H5Screate(H5S_SCALAR), H5Sclose, "create a scalar");
  write_attribute(object, key, H5T_IEEE_F64LE, space.get(), &value);
}

void write_shape(hid_t object, const Shape& shape) {
  const std::array<hsize_t, 1> extent{shape.size()};
  Handle space(shape.empty() ? H5Screate(H5S_NULL) : H5Screate_simple(1, extent.data(), nullptr),
               H5Sclose, "create a space");
  Handle attribute(
      H5Acreate2(object, "shape", H5T_STD_I64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
      "create an attribute");
  if (!shape.empty()) {
    check(H5Awrite(attribute.get(), H5T_STD_I64LE, shape.data()), "write an attribute");
  }
}

void write_info(hid_t root, const SnapshotHeader& header) {
  const SnapshotInfo& info = header.info;
  write_text(root, "format", "hsdp snapshot");
  write_whole(root, "schema_version", schema_version(header));
  write_text(root, "id", info.id);
  if (!info.reducer.empty()) write_text(root, "reducer", info.reducer);
  write_whole(root, "step", info.step);
  write_whole(root, "replicate_size", info.replicate_size);
  write_whole(root, "shard_size", info.shard_size);
  write_whole(root, "rank", info.rank);
  write_whole(root, "file_count", header.file_count);
  write_whole(root, "microbatch_count", info.microbatch_count);
  write_number(root, "divide_factor", info.divide_factor);
  write_number(root, "loss_scale", info.loss_scale);
  write_text(root, "replica_dtype", replica_dtype_text(info));
  write_text(root, "replica_hop", info.replica_hop);
  write_whole(root, "quantizes", info.quantizes ? 1 : 0);
  write_text(root, "reduction", info.reduction);
  write_text(root, "layout", info.layout);
  write_text(root, "engine", info.engine);
  write_whole(root, "partial", info.partial ? 1 : 0);
}

// The name of a parameter's link. What HDF5 reads as a path, and what C strings cannot hold, is
// percent-encoded.
std::string link_name(const std::string& name) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  const bool dots = name.find_first_not_of('.') == std::string::npos;
  std::string link;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '/' || c == '%' || byte < 0x20 || dots) {
      link += {'%', kHex[byte >> 4U], kHex[byte & 15U]};
    } else {
      link += c;
    }
  }
  return link;
}

// A whole parameter keeps its shape; a slice of one is a vector.
Handle data_space(const SnapshotSlice& slice) {
  std::vector<hsize_t> extents;
  if (slice.count == element_count(slice.shape)) {
    extents.assign(slice.shape.begin(), slice.shape.end());
    if (extents.empty()) return {H5Screate(H5S_SCALAR), H5Sclose, "create a scalar"};
  } else {
    extents.push_back(static_cast<hsize_t>(slice.count));
  }
  return {H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr), H5Sclose,
          "create a space"};
}

std::uint64_t file_offset(hid_t dataset) {
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF) fail("place a dataset");
  return offset;
}

// Contiguous, allocated immediately and never filled: we write the data without HDF5.
Handle dataset_properties() {
  Handle properties = property_list(H5P_DATASET_CREATE);
  check(H5Pset_layout(properties.get(), H5D_CONTIGUOUS), "set a layout");
  check(H5Pset_alloc_time(properties.get(), H5D_ALLOC_TIME_EARLY), "set a layout");
  check(H5Pset_fill_time(properties.get(), H5D_FILL_TIME_NEVER), "set a layout");
  check(H5Pset_obj_track_times(properties.get(), false), "set a layout");
  return properties;
}

// Makes an empty dataset and finds out where its data will lie.
Handle make_dataset(hid_t group, hid_t properties, SnapshotSlice& slice) {
  Handle type = data_type(slice.data_dtype);
  Handle space = data_space(slice);
  Handle dataset(H5Dcreate2(group, link_name(slice.name).c_str(), type.get(), space.get(),
                            H5P_DEFAULT, properties, H5P_DEFAULT),
                 H5Dclose, "create a dataset");
  slice.data_offset = slice.count == 0 ? 0 : file_offset(dataset.get());
  return dataset;
}

void add_dataset(hid_t group, hid_t properties, std::size_t index, SnapshotSlice& slice) {
  Handle dataset = make_dataset(group, properties, slice);
  write_text(dataset.get(), "name", slice.name);
  write_whole(dataset.get(), "index", static_cast<std::int64_t>(index));
  write_shape(dataset.get(), slice.shape);
  write_text(dataset.get(), "dtype", name(slice.dtype));
  write_text(dataset.get(), "reduce_dtype", name(slice.reduce_dtype));
  write_whole(dataset.get(), "offset", slice.offset);
  write_whole(dataset.get(), "count", slice.count);
  write_whole(dataset.get(), "first_block", static_cast<std::int64_t>(slice.first_block));
}

void add_state(hid_t group, hid_t properties, SnapshotSlice& array) {
  Handle dataset = make_dataset(group, properties, array);
  write_text(dataset.get(), "key", array.name);
  write_whole(dataset.get(), "first_block", static_cast<std::int64_t>(array.first_block));
}

std::uint64_t add_checksum_table(hid_t root, hid_t properties, std::uint64_t block_count) {
  const std::array<hsize_t, 1> extent{block_count};
  Handle space(H5Screate_simple(1, extent.data(), nullptr), H5Sclose, "create a space");
  Handle dataset(H5Dcreate2(root, "block_checksums", H5T_STD_U64LE, space.get(), H5P_DEFAULT,
                            properties, H5P_DEFAULT),
                 H5Dclose, "create a dataset");
  return block_count == 0 ? 0 : file_offset(dataset.get());
}

// The memory that HDF5 writes a file to. HDF5 would free it when it closes the file; this keeps it.
struct FileImage {
  std::byte* data = nullptr;
  std::size_t size_bytes = 0;

  FileImage() = default;
  FileImage(const FileImage&) = delete;
  FileImage& operator=(const FileImage&) = delete;
  ~FileImage() { std::free(data); }
};

void* resize_image(void* data, std::size_t size_bytes, H5FD_file_image_op_t /*operation*/,
                   void* image) {
  void* larger = std::realloc(data, size_bytes);
  if (larger != nullptr) static_cast<FileImage*>(image)->size_bytes = size_bytes;
  return larger;
}

herr_t keep_image(void* data, H5FD_file_image_op_t /*operation*/, void* image) {
  static_cast<FileImage*>(image)->data = static_cast<std::byte*>(data);
  return 0;
}

void* share_image(void* image) { return image; }
herr_t unshare_image(void* /*image*/) { return 0; }

// The space for all metadata, which comes before the data: otherwise the image would have to
// include the data. An excess stays in the file as zeros; a shortfall only costs memory.
std::size_t estimate_metadata_bytes(const SnapshotHeader& header) {
  std::size_t bytes = 8192;
  for_each_slice(header, [&bytes](const SnapshotSlice& slice) {
    bytes += 1024 + 2 * slice.name.size() + sizeof(std::int64_t) * slice.shape.size();
  });
  return bytes;
}

// The 1.8 format has checksums of its metadata, and every HDF5 since 2008 reads it.
Handle create_file(const SnapshotHeader& header, std::size_t user_block_bytes, FileImage& image) {
  Handle creation = property_list(H5P_FILE_CREATE);
  check(H5Pset_userblock(creation.get(), user_block_bytes), "reserve the header");
  Handle access = property_list(H5P_FILE_ACCESS);
  check(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V18, H5F_LIBVER_V18), "choose the format");
  check(H5Pset_fapl_core(access.get(), 1U << 16U, false), "work in memory");
  check(H5Pset_meta_block_size(access.get(), estimate_metadata_bytes(header)), "work in memory");
  // Every dataset begins on a cache line, for programs that map the file.
  check(H5Pset_small_data_block_size(access.get(), 0), "align the data");
  check(H5Pset_alignment(access.get(), 1, 64), "align the data");
  H5FD_file_image_callbacks_t callbacks{};
  callbacks.image_realloc = resize_image;
  callbacks.image_free = keep_image;
  callbacks.udata_copy = share_image;
  callbacks.udata_free = unshare_image;
  callbacks.udata = &image;
  check(H5Pset_file_image_callbacks(access.get(), &callbacks), "work in memory");
  return {H5Fcreate("hsdp_snapshot", H5F_ACC_TRUNC, creation.get(), access.get()), H5Fclose,
          "create a file"};
}

// The file's end as stated in the superblock: readers refuse a shorter file.
std::uint64_t end_of_file(const FileImage& image, std::size_t user_block_bytes) {
  constexpr std::size_t kEndField = 28;
  std::uint64_t end = 0;
  if (image.data == nullptr || image.size_bytes < user_block_bytes + kEndField + sizeof end) {
    fail("write the structure");
  }
  std::memcpy(&end, image.data + user_block_bytes + kEndField, sizeof end);
  return end + user_block_bytes;
}

void write_structure(SnapshotHeader& header, std::size_t user_block_bytes, FileImage& image) {
  Handle file = create_file(header, user_block_bytes, image);
  write_info(file.get(), header);
  {
    Handle properties = dataset_properties();
    header.checksums_offset = add_checksum_table(file.get(), properties.get(), header.block_count);
    Handle group(H5Gcreate2(file.get(), "gradients", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                 H5Gclose, "create a group");
    for (std::size_t i = 0; i < header.slices.size(); ++i) {
      add_dataset(group.get(), properties.get(), i, header.slices[i]);
    }
    if (!header.hop_state.empty()) {
      Handle arrays(H5Gcreate2(file.get(), "hop_state", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                    H5Gclose, "create a group");
      for (SnapshotSlice& array : header.hop_state) {
        add_state(arrays.get(), properties.get(), array);
      }
    }
  }
  file.close("write the structure");
}

// Runs `work` exclusively, through the gate. Meanwhile the process's HDF5 error handler is
// disabled, as failures become exceptions; it is restored afterwards.
void enter_hdf5(const std::function<void()>& work) {
  std::exception_ptr error;
  const auto enter = [&] {
    const std::lock_guard alone(entrance().hdf5_mutex);
    H5E_BEGIN_TRY {
      try {
        work();
      } catch (...) {
        error = std::current_exception();
      }
    }
    H5E_END_TRY
  };
  Hdf5Gate gate;
  {
    const std::lock_guard lock(entrance().gate_mutex);
    gate = entrance().gate;
  }
  gate ? gate(enter) : enter();
  if (error) std::rethrow_exception(error);
}

}  // namespace

void set_hdf5_gate(Hdf5Gate gate) {
  const std::lock_guard lock(entrance().gate_mutex);
  entrance().gate = std::move(gate);
}

Hdf5Structure build_hdf5_structure(SnapshotHeader& header, std::size_t user_block_bytes) {
  FileImage image;
  enter_hdf5([&] { write_structure(header, user_block_bytes, image); });
  Hdf5Structure structure;
  structure.file_bytes = end_of_file(image, user_block_bytes);
  structure.front.assign(
      image.data, image.data + std::min<std::uint64_t>(image.size_bytes, structure.file_bytes));
  const std::uint64_t table_end =
      header.checksums_offset + header.block_count * sizeof(std::uint64_t);
  if (structure.front.size() < table_end) structure.front.resize(table_end);
  return structure;
}

}  // namespace hsdp
