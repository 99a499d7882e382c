#include "hsdp/dtype.h"

#include <array>
#include <string>

#include "hsdp/error.h"

namespace hsdp {
namespace {

struct DtypeFacts {
  std::string_view name;
  std::string_view long_name;
  std::size_t bytes;
};

constexpr std::array<DtypeFacts, 6> kFacts{{{"f32", "float32", 4},
                                            {"bf16", "bfloat16", 2},
                                            {"f16", "float16", 2},
                                            {"f64", "float64", 8},
                                            {"i64", "int64", 8},
                                            {"u8", "uint8", 1}}};

}  // namespace

std::size_t size_bytes(Dtype dtype) { return kFacts[static_cast<std::size_t>(dtype)].bytes; }

std::string_view name(Dtype dtype) { return kFacts[static_cast<std::size_t>(dtype)].name; }

Dtype parse_dtype(std::string_view text) {
  for (std::size_t i = 0; i < kFacts.size(); ++i) {
    if (text == kFacts[i].name || text == kFacts[i].long_name) return static_cast<Dtype>(i);
  }
  throw UsageError({.where = "dtype",
                    .expected = "one of f32, bf16, f16, f64, i64, u8",
                    .got = "'" + std::string(text) + "'"});
}

}  // namespace hsdp
