#include "hsdp/wait_table.h"

#include <array>
#include <cstdio>

namespace hsdp {

std::string WaitTable::text() const {
  std::array<char, 64> unexplained{};
  if (unexplained_s > 0) {
    std::snprintf(unexplained.data(), unexplained.size(), ", %.2f s of waits unexplained",
                  unexplained_s);
  }
  std::array<char, 192> rest{};
  std::snprintf(rest.data(), rest.size(),
                " in %lld operations, %lld step%s, %.2f s (clock error %.2f ms%s)",
                static_cast<long long>(operations), static_cast<long long>(steps),
                steps == 1 ? "" : "s", span_s, clock_error_s * 1e3, unexplained.data());
  if (!straggler) return std::string("no rank was waited for") + rest.data();
  double seconds = 0;
  int count = 0;
  for (const Wait& wait : waits) {
    if (wait.awaited != *straggler) continue;
    seconds += wait.seconds;
    ++count;
  }
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), "rank %d was waited for %.2f s by %d rank%s", *straggler,
                seconds, count, count == 1 ? "" : "s");
  return std::string(text.data()) + rest.data();
}

}  // namespace hsdp
