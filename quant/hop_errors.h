// The errors of both halves of a hop: of all windows that it sends, and on their way back of those
// that this replica owns [Note: who keeps which error].
//
// Used between steps by one thread, in a step by the one that enqueues reductions.
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
  // `names` of the plan's parameters, the maps of all windows.
  HopErrors(const Kind& kind, const HopPlan& plan, std::vector<std::string> names,
            std::vector<GroupMap> maps);

  void set_replica(int replica) { replica_ = replica; }
  [[nodiscard]] int replicas() const { return replicas_; }

  [[nodiscard]] LocoExchange::Errors next(std::size_t window, bool cleared,
                                          const LocoExchange& exchange);
  // `cleared`: the step has cleared all errors, those too that it did not reduce.
  void end_step(bool clean, bool cleared, const LocoExchange& exchange);

  // Between steps, when nothing is under way.
  [[nodiscard]] std::vector<HopState> state() const;  // the errors alone
  void scale(float factor) const;
  // UsageError, and nothing has changed, where elements have none in `saved`; unless it may be so.
  void load(const SavedState& saved, bool all);
  // Takes the memory that joined() needs.
  void reserve_to_join();
  // Collective over `replicas`: this replica's errors, and the gathered half's of all.
  [[nodiscard]] SavedState joined(Communicator& replicas, SavedHeader header) const;
  // Where this replica's errors lie, by parameter.
  using Places = std::map<std::string, std::vector<ErrorPlace>>;
  [[nodiscard]] Places places() const;
  // UsageError unless it has been the same replica, and has errors of all that `now` sends of the
  // parameters that they have in common.
  void require_fits(const HopErrors& now) const;

 private:
  // Errors of a run of a parameter, and where they are kept.
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
  std::unique_ptr<ErrorStates> gathered_;  // of as many elements as any replica may own; or null
  Buffer message_;                         // to join them
  MemoryCount::Held held_;
};

}  // namespace hsdp::quant
