// The names, shapes and dtypes in a safetensors file, of which only the header is read.
//
// The format: the header's size as 8 bytes in little-endian order, the header in JSON, the data.
// Source: the format's description in the safetensors repository of Hugging Face.
#pragma once

#include <filesystem>
#include <vector>

#include "hsdp/reducer_options.h"

namespace hsdp {

// Appends a file's tensors to `to`, in the order of their data; integers are left out. Throws
// UsageError for a file that is no such one, also where the header is larger than 100 MB or than
// the file, or says what the data cannot hold, and for floating point that is no gradient's dtype.
void read_safetensors(const std::filesystem::path& path, std::vector<ParameterSpec>& to);

}  // namespace hsdp
