#include "hsdp/snapshot/copy_checker.h"

#include <algorithm>
#include <cstring>

namespace hsdp {
namespace {

std::int64_t first_unequal(const std::byte* a, const std::byte* b, std::int64_t count,
                           std::size_t element_bytes) {
  const auto bytes = static_cast<std::size_t>(count) * element_bytes;
  if (std::memcmp(a, b, bytes) == 0) return -1;
  const auto at = std::mismatch(a, a + bytes, b).first - a;
  return at / static_cast<std::ptrdiff_t>(element_bytes);
}

}  // namespace

std::optional<UnequalElement> CopyChecker::check(std::size_t parameter, std::int64_t begin,
                                                 StoredElements first) {
  const Snapshot& snapshot = reader_.snapshot();
  if (snapshot.info().partial) return std::nullopt;
  const std::size_t element_bytes = size_bytes(first.dtype);
  for (int copy = 1; copy < snapshot.copy_count(); ++copy) {
    for (std::int64_t done = 0; done < first.count;) {
      const StoredElements other = reader_.read(parameter, copy, begin + done);
      const std::int64_t count = std::min(other.count, first.count - done);
      const std::byte* data = first.data + static_cast<std::size_t>(done) * element_bytes;
      const std::int64_t unequal = first_unequal(data, other.data, count, element_bytes);
      if (unequal >= 0) return UnequalElement{copy, begin + done + unequal};
      done += count;
    }
  }
  return std::nullopt;
}

}  // namespace hsdp
