#include "hsdp/tools/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "hsdp/error.h"
#include "hsdp/snapshot/snapshot_header.h"

namespace hsdp {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  // as safetensors itself has it
constexpr std::uint64_t kSizeBytes = 8;
constexpr int kMostNested = 3;  // the header, a tensor, its shape

struct Tensor {
  ParameterSpec spec;
  std::uint64_t begin = 0;
};

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& expected,
                         const std::string& got) {
  throw UsageError({.where = "--safetensors: " + printable(path.string()),
                    .expected = expected,
                    .got = got,
                    .remedy = "give a file in the safetensors format"});
}

std::optional<Dtype> dtype_of(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, Dtype>, 4> kDtypes{
      {{"F32", Dtype::kF32}, {"BF16", Dtype::kBf16}, {"F16", Dtype::kF16}, {"F64", Dtype::kF64}}};
  const auto* const found =
      std::ranges::find(kDtypes, text, &std::pair<std::string_view, Dtype>::first);
  return found == kDtypes.end() ? std::nullopt : std::optional(found->second);
}

// Of tensors that have no gradient.
bool is_left_out(std::string_view dtype) {
  constexpr std::array<std::string_view, 9> kIntegers{"I8",  "I16", "I32", "I64", "U8",
                                                      "U16", "U32", "U64", "BOOL"};
  return std::ranges::find(kIntegers, dtype) != kIntegers.end();
}

std::string read_header(const std::filesystem::path& path, std::uint64_t& data_bytes) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) refuse(path, "a file", "none");
  const std::uint64_t file_bytes = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  std::array<unsigned char, kSizeBytes> size{};
  file.read(reinterpret_cast<char*>(size.data()), kSizeBytes);
  if (error || !file) refuse(path, "the size of a header", "a file that is shorter or unreadable");
  std::uint64_t header_bytes = 0;
  for (std::size_t i = kSizeBytes; i-- > 0;) header_bytes = header_bytes << 8U | size[i];
  const std::uint64_t most = std::min(kMostHeaderBytes, file_bytes - kSizeBytes);
  if (header_bytes > most) {
    refuse(path, "a header of at most " + std::to_string(most) + " bytes",
           std::to_string(header_bytes));
  }
  std::string header(static_cast<std::size_t>(header_bytes), '\0');
  file.read(header.data(), static_cast<std::streamsize>(header_bytes));
  if (!file) refuse(path, "a readable header", "an error of the file system");
  data_bytes = file_bytes - kSizeBytes - header_bytes;
  return header;
}

json parse(const std::filesystem::path& path, const std::string& header) {
  const json::parser_callback_t bound_depth = [&path](int depth, json::parse_event_t, json&) {
    if (depth > kMostNested) refuse(path, "a header of tensors", "one that nests deeper");
    return true;
  };
  try {
    json root = json::parse(header, bound_depth);
    if (root.is_object()) return root;
  } catch (const json::exception&) {
  }
  refuse(path, "a header in JSON", "other bytes");
}

std::uint64_t whole(const std::filesystem::path& path, const json& value) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) {
    refuse(path, "sizes of at least 0", "other values");
  }
  return value.get<std::uint64_t>();
}

const json& list(const std::filesystem::path& path, const json& tensor, const char* key) {
  const auto found = tensor.find(key);
  if (found == tensor.end() || !found->is_array()) {
    refuse(path, std::string("a list '") + key + "' of each tensor", "a tensor without");
  }
  return *found;
}

// Nothing of a dtype that is left out.
std::optional<Tensor> decode(const std::filesystem::path& path, const std::string& name,
                             const json& tensor, std::uint64_t data_bytes) {
  const auto dtype = tensor.is_object() ? tensor.find("dtype") : tensor.end();
  if (!tensor.is_object() || dtype == tensor.end() || !dtype->is_string()) {
    refuse(path, "a dtype of each tensor", "a tensor without");
  }
  const auto& text = dtype->get_ref<const std::string&>();
  if (is_left_out(text)) return std::nullopt;
  const std::optional<Dtype> its_dtype = dtype_of(text);
  if (!its_dtype) refuse(path, "gradients in F32, BF16, F16 or F64", printable(text));
  Tensor result{.spec = {.name = name, .dtype = *its_dtype}};
  std::uint64_t bytes = size_bytes(*its_dtype);
  bool fits = true;
  for (const json& extent : list(path, tensor, "shape")) {
    const std::uint64_t count = whole(path, extent);
    fits = fits && (count == 0 || bytes <= data_bytes / count);
    bytes = fits ? bytes * count : 0;
    result.spec.shape.push_back(static_cast<std::int64_t>(count));
  }
  const json& offsets = list(path, tensor, "data_offsets");
  if (offsets.size() != 2) refuse(path, "two data_offsets", std::to_string(offsets.size()));
  result.begin = whole(path, offsets[0]);
  const std::uint64_t end = whole(path, offsets[1]);
  if (!fits || result.begin > end || end > data_bytes || end - result.begin != bytes) {
    refuse(path, "tensors that lie in its " + std::to_string(data_bytes) + " bytes of data",
           "'" + printable(name) + "', which does not");
  }
  return result;
}

}  // namespace

void read_safetensors(const std::filesystem::path& path, std::vector<ParameterSpec>& to) {
  std::uint64_t data_bytes = 0;
  const std::string header = read_header(path, data_bytes);
  const json root = parse(path, header);
  std::vector<Tensor> tensors;
  for (const auto& [name, tensor] : root.items()) {
    if (name == "__metadata__") continue;
    if (std::optional<Tensor> one = decode(path, name, tensor, data_bytes)) {
      tensors.push_back(std::move(*one));
    }
  }
  std::ranges::stable_sort(tensors, {}, &Tensor::begin);
  for (Tensor& one : tensors) to.push_back(std::move(one.spec));
}

}  // namespace hsdp
