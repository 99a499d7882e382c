// What the ranks of a group say to each other in one exchange, and what comes of it.
//
// Whoever passes it on merges it as it comes, so where all agree it is as long as one rank's words.
// Without I/O.
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
  // Texts that ought to be the same on all ranks, by place. A rank may say nothing in a place.
  std::vector<std::optional<std::string>> equal{};
  std::string any{};                 // bits, joined by OR
  std::vector<std::int64_t> sum{};   // added up by place
  std::vector<std::int64_t> most{};  // of each place the largest
  std::string note{};                // of those that are not empty, the lowest rank's reaches all
  // Every text reaches all, with everybody who said it; otherwise the few that most have said, with
  // the first who did.
  bool keeps_all = false;

  void encode(WireWriter& out) const;
  [[nodiscard]] static Saying decode(WireReader& in);
};

// A message for everybody, whatever the others say.
[[nodiscard]] Saying message_to_all(std::string message);

struct Agreement {
  static constexpr std::size_t kMostTexts = 4;  // to a place, unless all are kept
  static constexpr std::size_t kMostRanks = 8;  // to a text, likewise

  struct Said {
    std::string text;
    int count = 0;           // how many ranks said it
    std::vector<int> ranks;  // who, ascending world ranks: the first of them, or all
  };
  struct Place {
    std::vector<Said> said;  // each text once, in the order of their first ranks
  };

  std::vector<Place> places;
  std::string any;
  std::vector<std::int64_t> sum;
  std::vector<std::int64_t> most;
  std::string note;
  int note_rank = -1;  // a world rank; -1: nobody had one
  bool keeps_all = false;

  // Ranks may come in any order, each once.
  void add(int rank, const Saying& saying);
  void merge(const Agreement& other);
  // Leaves out what does not reach all, and puts the rest in order: once all are added, or before
  // it goes on as a part.
  void close();

  // Where all is kept: what these ranks said in that place, in their order.
  [[nodiscard]] std::vector<std::string> messages(std::span<const int> ranks,
                                                  std::size_t place = 0) const;

  void encode(WireWriter& out) const;
  [[nodiscard]] static Agreement decode(WireReader& in);
};

}  // namespace hsdp::comm
