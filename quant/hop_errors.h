// The errors of both halves of a hop: of all windows that it sends, and on the way back of the
// windows that this replica owns [Note: who keeps which error].
//
// Not thread-safe. During a step only the thread that enqueues reductions may use it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/memory_count.h"
#include "quant/error_state.h"
#include "quant/group_map.h"
#include "quant/hop_state.h"
#include "quant/loco_exchange.h"

namespace hsdp::quant {

class HopErrors {
 public:
  struct Kind {
    Dtype dtype = Dtype::kU8;
    int group_size = 64;
    double beta = 0.8;
    bool gathered = true;  // the gathered half keeps errors, too
  };
  // `names` of the plan's parameters, `maps` of all windows.
  HopErrors(const Kind& kind, const HopPlan& plan, std::vector<std::string> names,
            std::vector<GroupMap> maps);

  // The memory that the errors of these windows need.
  [[nodiscard]] static std::int64_t bytes(const Kind& kind, std::span<const GroupMap> maps);

  void set_replica(int replica) { replica_ = replica; }
  [[nodiscard]] int replicas() const { return replicas_; }

  [[nodiscard]] LocoExchange::Errors next(std::size_t window, bool cleared,
                                          const LocoExchange& exchange);
  // `cleared`: the step has cleared all errors, even those of windows it did not reduce.
  void end_step(bool clean, bool cleared, const LocoExchange& exchange);

  // Call the rest between steps, when nothing is in progress.
  [[nodiscard]] std::vector<HopState> state() const;  // only the errors
  void scale(float factor) const;
  // Throws UsageError, and changes nothing, if `all` is set and `saved` lacks errors of an element.
  void load(const SavedState& saved, bool all);
  // Allocates the memory that joined() needs.
  void reserve_to_join();
  // Collective over `replicas`: this replica's errors, and all gathered halves.
  [[nodiscard]] SavedState joined(Communicator& replicas, SavedHeader header) const;
  // Where this replica's errors lie, by parameter.
  using Places = std::map<std::string, std::vector<ErrorPlace>>;
  [[nodiscard]] Places places() const;
  // Throws UsageError if `now` is another replica, or if this lacks errors that `now` needs for
  // their common parameters.
  void require_fits(const HopErrors& now) const;

 private:
  // The errors of a run of a parameter, and where they lie.
  struct Piece {
    int parameter = 0;
    bool gathered = false;
    std::int64_t flat_offset = 0;
    std::int64_t count = 0;
    ErrorState errors;
  };
  void add_pieces(std::span<const GroupTile> tiles, bool gathered, const ErrorState& errors,
                  std::vector<Piece>& to) const;
  [[nodiscard]] std::vector<Piece> pieces() const;
  void append(const Piece& piece, std::vector<HopState>& to) const;
  [[nodiscard]] ErrorPlace place_of(const Piece& piece) const;
  [[nodiscard]] std::int64_t groups(const Piece& piece) const;
  [[nodiscard]] std::int64_t message_bytes(int owner) const;
  [[nodiscard]] RowCut message_cut() const;

  Kind kind_;
  std::vector<std::string> names_;
  std::vector<GroupMap> maps_;
  Device device_;
  int replicas_ = 0;
  int replica_ = 0;
  std::unique_ptr<ErrorStates> scattered_;
  std::unique_ptr<ErrorStates> gathered_;  // sized for any replica's share; may be null
  Buffer message_;                         // for joined()
  MemoryCount::Held held_;
};

}  // namespace hsdp::quant
