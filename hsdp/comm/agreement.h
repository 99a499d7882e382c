// What the ranks of a group say in one exchange, and the result.
//
// Each relay merges what it passes on, so if all ranks agree, the result is as long as one rank's
// message. No I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace hsdp::comm {

class WireReader;
class WireWriter;

// What one rank says.
struct Saying {
  // Texts that should be the same on all ranks, by place. A rank may leave a place empty.
  std::vector<std::optional<std::string>> equal{};
  std::string any{};                 // bits, joined by OR
  std::vector<std::int64_t> sum{};   // added up, by place
  std::vector<std::int64_t> most{};  // the largest, by place
  std::string note{};                // the lowest rank's non-empty note reaches all
  // Every text reaches all, with every rank that said it. Otherwise only the few most common texts
  // do, with the first ranks that said them.
  bool keeps_all = false;

  void encode(WireWriter& out) const;
  [[nodiscard]] static Saying decode(WireReader& in);
};

// A message for every rank, whatever the others say.
[[nodiscard]] Saying message_to_all(std::string message);

struct Agreement {
  static constexpr std::size_t kMostTexts = 4;  // per place, unless all are kept
  static constexpr std::size_t kMostRanks = 8;  // per text, likewise

  struct Said {
    std::string text;
    int count = 0;           // how many ranks said it
    std::vector<int> ranks;  // ascending world ranks that said it: the first ones, or all
  };
  struct Place {
    std::vector<Said> said;  // each text once, ordered by first rank
  };

  std::vector<Place> places;
  std::string any;
  std::vector<std::int64_t> sum;
  std::vector<std::int64_t> most;
  std::string note;
  int note_rank = -1;  // a world rank; -1: there is no note
  bool keeps_all = false;

  // Ranks may be added in any order, each once.
  void add(int rank, const Saying& saying);
  void merge(const Agreement& other);
  // Drops what does not reach all, and sorts the rest. Call it once all are added, or before
  // passing on a part.
  void close();

  // With keeps_all: what these ranks said in that place, in their order.
  [[nodiscard]] std::vector<std::string> messages(std::span<const int> ranks,
                                                  std::size_t place = 0) const;

  void encode(WireWriter& out) const;
  [[nodiscard]] static Agreement decode(WireReader& in);
};

}  // namespace hsdp::comm
