#include "hsdp/reducer/compare_lines.h"

#include <algorithm>

namespace hsdp::reducer {
namespace {

// FNV-1a.
std::uint64_t text_digest(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

// The first rank that differs from rank 0, the same on every rank; none if all agree.
std::optional<int> first_difference(const std::vector<std::string>& all) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] != all.front()) return static_cast<int>(r);
  }
  return std::nullopt;
}

}  // namespace

std::uint64_t digest_of(const std::vector<std::string>& lines) {
  std::string whole;
  for (const std::string& line : lines) whole += line + "\n";
  return text_digest(whole);
}

std::optional<LineDifference> compare_lines(Communicator& world,
                                            const std::vector<std::string>& lines,
                                            std::string_view what) {
  std::string digests;
  for (const std::string& line : lines) digests += std::to_string(text_digest(line)) + "\n";
  const std::vector<std::string> all =
      world.exchange(lines.empty() ? std::string() : std::to_string(digest_of(lines)), what);
  if (!first_difference(all)) return std::nullopt;
  const auto empty = std::ranges::find(all, std::string());
  if (empty != all.end()) {
    return LineDifference{.rank = static_cast<int>(empty - all.begin()), .is_empty = true};
  }
  const std::vector<std::string> of_lines = world.exchange(digests, what);
  const std::optional<int> rank = first_difference(of_lines);
  if (!rank) return std::nullopt;  // the same lines after all
  const std::string& theirs = of_lines[static_cast<std::size_t>(*rank)];
  const auto differs = std::ranges::mismatch(of_lines.front(), theirs).in1;
  const auto line = static_cast<std::size_t>(std::count(of_lines.front().begin(), differs, '\n'));
  const std::vector<std::string> texts =
      world.exchange(line < lines.size() ? lines[line] : "nothing more", what);
  return LineDifference{.line = line,
                        .expected = texts.front(),
                        .got = texts[static_cast<std::size_t>(*rank)],
                        .rank = *rank};
}

}  // namespace hsdp::reducer
