#include "quant/hop_errors.h"

#include <algorithm>
#include <utility>

#include "hsdp/device/copy.h"
#include "hsdp/error.h"
#include "hsdp/kernels/scale_and_cast.h"

namespace hsdp::quant {
namespace {

ErrorStates::Extent extent_of(const GroupMap& map, int owner) {
  const GroupMap::Begin& begin = map.begin(owner);
  const GroupMap::Begin& end = map.begin(owner + 1);
  return {end.position - begin.position, end.group - begin.group};
}

std::vector<ErrorStates::Extent> sent_extents(std::span<const GroupMap> maps) {
  std::vector<ErrorStates::Extent> sent;
  for (const GroupMap& map : maps) sent.push_back({map.element_count(), map.group_count()});
  return sent;
}

// For any replica.
std::vector<ErrorStates::Extent> owned_extents(std::span<const GroupMap> maps) {
  std::vector<ErrorStates::Extent> owned;
  for (const GroupMap& map : maps) {
    ErrorStates::Extent& most = owned.emplace_back();
    for (int r = 0; r < map.owners(); ++r) {
      const ErrorStates::Extent extent = extent_of(map, r);
      most.elements = std::max(most.elements, extent.elements);
      most.groups = std::max(most.groups, extent.groups);
    }
  }
  return owned;
}

ErrorState moved(const ErrorState& errors, std::int64_t elements, std::int64_t groups) {
  ErrorState result = errors;
  if (errors.codes != nullptr) result.codes += elements;
  if (errors.scales != nullptr) result.scales += groups;
  if (errors.values != nullptr) result.values += elements;
  return result;
}

// The size of errors in a message: scales and codes, padded to 4 bytes, or values.
std::int64_t message_bytes_of(Dtype dtype, const ErrorStates::Extent& extent) {
  if (dtype == Dtype::kF32) return 4 * extent.elements;
  return 4 * extent.groups + padded(extent.elements, 4);
}

ErrorState errors_in(std::byte* message, Dtype dtype, const ErrorStates::Extent& extent) {
  if (dtype == Dtype::kF32) return {.values = reinterpret_cast<float*>(message)};
  return {.codes = reinterpret_cast<std::int8_t*>(message + 4 * extent.groups),
          .scales = reinterpret_cast<float*>(message)};
}

template <typename Value>
void copy_numbers(Value* to, const Value* from, std::int64_t count, const Stream& stream) {
  if (to == nullptr || count == 0) return;
  copy_bytes(to, from, static_cast<std::size_t>(count) * sizeof(Value), stream);
}

}  // namespace

HopErrors::HopErrors(const Kind& kind, const HopPlan& plan, std::vector<std::string> names,
                     std::vector<GroupMap> maps)
    : kind_(kind),
      names_(std::move(names)),
      maps_(std::move(maps)),
      device_(plan.device),
      replicas_(plan.replicate_size) {
  scattered_ = std::make_unique<ErrorStates>(kind_.dtype, sent_extents(maps_), device_);
  if (kind_.gathered) {
    gathered_ = std::make_unique<ErrorStates>(kind_.dtype, owned_extents(maps_), device_);
  }
  held_ = plan.memory.hold(MemoryKind::kReplicaHop, bytes(kind_, maps_));
}

std::int64_t HopErrors::bytes(const Kind& kind, std::span<const GroupMap> maps) {
  const std::int64_t owned =
      kind.gathered ? ErrorStates::bytes(kind.dtype, owned_extents(maps)) : 0;
  return 2 * (ErrorStates::bytes(kind.dtype, sent_extents(maps)) + owned);
}

LocoExchange::Errors HopErrors::next(std::size_t window, bool cleared,
                                     const LocoExchange& exchange) {
  LocoExchange::Errors errors;
  errors.scattered = scattered_->next(window, cleared, exchange.encode_stream());
  if (gathered_) errors.gathered = gathered_->next(window, cleared, exchange.sum_stream());
  return errors;
}

void HopErrors::end_step(bool clean, bool cleared, const LocoExchange& exchange) {
  for (ErrorStates* const errors : {scattered_.get(), gathered_.get()}) {
    if (errors == nullptr) continue;
    if (clean && cleared) errors->clear_unwritten(exchange.encode_stream());
    clean ? errors->commit() : errors->drop();
  }
}

// Pieces are cut at groups, and where a slice begins or ends.
void HopErrors::add_pieces(std::span<const GroupTile> tiles, bool gathered,
                           const ErrorState& errors, std::vector<Piece>& to) const {
  const std::size_t first_piece = to.size();
  for (const GroupTile& tile : tiles) {
    if (to.size() > first_piece) {
      Piece& last = to.back();
      if (last.parameter == tile.parameter && last.flat_offset + last.count == tile.flat_offset &&
          tile.flat_offset % kind_.group_size == 0) {
        last.count += tile.count;
        continue;
      }
    }
    const GroupTile& first = tiles.front();
    to.push_back({tile.parameter, gathered, tile.flat_offset, tile.count,
                  moved(errors, tile.position - first.position, tile.group - first.group)});
  }
}

std::vector<HopErrors::Piece> HopErrors::pieces() const {
  std::vector<Piece> all;
  for (std::size_t w = 0; w < maps_.size(); ++w) {
    add_pieces(maps_[w].tiles(), false, scattered_->state(w), all);
    if (gathered_) add_pieces(maps_[w].tiles(replica_), true, gathered_->state(w), all);
  }
  return all;
}

std::int64_t HopErrors::groups(const Piece& piece) const {
  return groups_between(piece.flat_offset, piece.flat_offset + piece.count, kind_.group_size);
}

ErrorPlace HopErrors::place_of(const Piece& piece) const {
  return {names_[static_cast<std::size_t>(piece.parameter)],
          piece.gathered ? ErrorPlace::kGathered : replica_, piece.flat_offset, piece.count};
}

void HopErrors::append(const Piece& piece, std::vector<HopState>& to) const {
  const ErrorPlace place = place_of(piece);
  const auto add = [&](std::string_view kind, void* data, std::int64_t count, Dtype dtype) {
    to.push_back({error_key(place, kind), {data, count, dtype, device_}});
  };
  if (piece.errors.values != nullptr) {
    add("values", piece.errors.values, piece.count, Dtype::kF32);
    return;
  }
  add("codes", piece.errors.codes, piece.count, Dtype::kU8);
  add("scales", piece.errors.scales, groups(piece), Dtype::kF32);
}

std::vector<HopState> HopErrors::state() const {
  std::vector<HopState> all;
  for (const Piece& piece : pieces()) append(piece, all);
  return all;
}

void HopErrors::scale(float factor) const {
  Stream stream = Stream::create(device_, "hsdp-loco");
  for (const Piece& piece : pieces()) {
    kernels::ScaleAndCast args;
    args.multiplier = factor;
    args.count = piece.count;
    args.out = piece.errors.values;
    if (piece.errors.values == nullptr) {
      args.count = groups(piece);
      args.out = piece.errors.scales;
    }
    args.in = args.out;
    stream.run([args, inside = stream.inside_task()] { kernels::scale_and_cast(args, inside); });
  }
  stream.synchronize();
}

void HopErrors::load(const SavedState& saved, bool all) {
  const SavedState::Wanted wanted{.replicas = replicas_,
                                  .group_size = kind_.group_size,
                                  .err_beta = kind_.beta,
                                  .as_values = kind_.dtype == Dtype::kF32};
  const std::vector<Piece> targets = pieces();
  std::vector<SavedErrors> found;
  for (const Piece& target : targets) {
    std::int64_t missing = 0;
    found.push_back(saved.errors_of(place_of(target), wanted, &missing));
    if (!all || missing == 0) continue;
    const std::string& name = names_[static_cast<std::size_t>(target.parameter)];
    throw UsageError(
        {.where = "loco: load_state",
         .expected = "errors of all " + std::to_string(target.count) + " elements from " +
                     std::to_string(target.flat_offset) + " of '" + name + "'" +
                     (target.gathered ? " in the gathered half" : ""),
         .got = std::to_string(missing) + " without",
         .remedy = "load what all ranks have saved, together; what was saved with another gather, "
                   "shard_over, exclude or error_feedback, or lacks parameters, with "
                   "strict=False"});
  }
  Stream stream = Stream::create(device_, "hsdp-loco");
  stream.run([&, inside = stream.inside_task()] {
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const ErrorState& to = targets[i].errors;
      copy_numbers(to.codes, found[i].codes.data(), targets[i].count, inside);
      copy_numbers(to.scales, found[i].scales.data(), std::ssize(found[i].scales), inside);
      copy_numbers(to.values, found[i].values.data(), targets[i].count, inside);
    }
  });
  stream.synchronize();
}

std::int64_t HopErrors::message_bytes(int owner) const {
  std::int64_t bytes = 0;
  for (const GroupMap& map : maps_) bytes += message_bytes_of(kind_.dtype, extent_of(map, owner));
  return bytes;
}

RowCut HopErrors::message_cut() const {
  std::vector<std::int64_t> begins{0};
  for (int r = 0; r < replicas_; ++r) begins.push_back(begins.back() + message_bytes(r));
  return RowCut(std::move(begins));
}

void HopErrors::reserve_to_join() {
  if (gathered_) message_ = Buffer(device_, static_cast<std::size_t>(message_cut().count()));
}

SavedState HopErrors::joined(Communicator& replicas, SavedHeader header) const {
  std::vector<HopState> all = state();
  quant::append(header, all);
  if (gathered_) {
    const RowCut cut = message_cut();
    // Visits a replica's errors in the message.
    const auto visit = [&](int owner, const auto& visitor) {
      std::byte* at = message_.data() + cut.begin(owner);
      for (std::size_t w = 0; w < maps_.size(); ++w) {
        const ErrorStates::Extent extent = extent_of(maps_[w], owner);
        visitor(w, extent, errors_in(at, kind_.dtype, extent));
        at += message_bytes_of(kind_.dtype, extent);
      }
    };
    Stream stream = Stream::create(device_, "hsdp-loco");
    stream.run([&, inside = stream.inside_task()] {
      visit(replica_, [&](std::size_t w, const ErrorStates::Extent& extent, const ErrorState& to) {
        const ErrorState from = gathered_->state(w);
        copy_numbers(to.codes, from.codes, extent.elements, inside);
        copy_numbers(to.scales, from.scales, extent.groups, inside);
        copy_numbers(to.values, from.values, extent.elements, inside);
      });
    });
    const TensorView whole = message_.view(Dtype::kU8);
    replicas.all_gather(whole.slice(cut.begin(replica_), cut.length(replica_)), whole, stream, cut);
    replicas.wait(stream.record());
    std::vector<Piece> others;
    for (int r = 0; r < replicas_; ++r) {
      if (r == replica_) continue;
      visit(r, [&](std::size_t w, const ErrorStates::Extent&, const ErrorState& errors) {
        add_pieces(maps_[w].tiles(r), true, errors, others);
      });
    }
    for (const Piece& piece : others) append(piece, all);
  }
  return SavedState(all);
}

HopErrors::Places HopErrors::places() const {
  Places places;
  for (const Piece& piece : pieces()) {
    const ErrorPlace place = place_of(piece);
    places[place.parameter].push_back(place);
  }
  return places;
}

void HopErrors::require_fits(const HopErrors& now) const {
  const auto refuse = [](const std::string& expected, const std::string& got) {
    throw UsageError({.where = "loco",
                      .expected = expected,
                      .got = got,
                      .remedy = "make another LocoHop, and load what all ranks have saved"});
  };
  const auto replica_text = [](const HopErrors& errors) {
    return "replica " + std::to_string(errors.replica_) + " of " + std::to_string(errors.replicas_);
  };
  if (now.replica_ != replica_ || now.replicas_ != replicas_) {
    refuse("the " + replica_text(*this) + " whose errors it keeps", replica_text(now));
  }
  const Places had = places();
  for (const auto& [name, wanted] : now.places()) {
    const auto found = had.find(name);
    if (found == had.end()) continue;
    std::int64_t missing = 0;
    for (const ErrorPlace& place : wanted) {
      if (place.replica == ErrorPlace::kGathered) continue;
      missing += place.count;
      for (const ErrorPlace& one : found->second) {
        const std::int64_t begin = std::max(place.flat_offset, one.flat_offset);
        const std::int64_t end =
            std::min(place.flat_offset + place.count, one.flat_offset + one.count);
        if (one.replica == place.replica && begin < end) missing -= end - begin;
      }
    }
    if (missing == 0) continue;
    refuse("the part of '" + name + "' whose errors it keeps",
           "another one, with " + std::to_string(missing) + " elements that it has none of");
  }
}

}  // namespace hsdp::quant
