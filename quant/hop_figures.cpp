#include "quant/hop_figures.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "hsdp/device/copy.h"

namespace hsdp::quant {
namespace {

double relative(const TileFigures& sum) {
  return sum.wanted > 0.0 ? std::sqrt(sum.missed / sum.wanted) : 0.0;
}

}  // namespace

HopFigures::HopFigures(std::vector<std::string> names, std::vector<GroupMap> maps, bool gathers,
                       Device device)
    : names_(std::move(names)), maps_(std::move(maps)), written_(maps_.size()), gathers_(gathers) {
  std::size_t tiles = 0;
  for (const GroupMap& map : maps_) {
    first_tile_.push_back(tiles);
    tiles += map.tiles().size();
  }
  first_tile_.push_back(tiles);
  memory_ = Buffer(device, (gathers ? 2 : 1) * tiles * sizeof(TileFigures));
}

HopFigures::Window HopFigures::next(std::size_t window) {
  written_[window] = true;
  auto* const figures = reinterpret_cast<TileFigures*>(memory_.data()) + first_tile_[window];
  return {figures, gathers_ ? figures + first_tile_.back() : nullptr};
}

void HopFigures::drop() { written_.assign(written_.size(), false); }

std::vector<QuantizationError> HopFigures::take(int replica) {
  if (std::ranges::none_of(written_, [](bool one) { return one; })) return {};
  std::vector<TileFigures> figures(memory_.size() / sizeof(TileFigures));
  Stream stream = Stream::create(memory_.device(), "hsdp-loco");
  stream.run([&, inside = stream.inside_task()] {
    copy_bytes(figures.data(), memory_.data(), memory_.size(), inside);
  });
  stream.synchronize();
  struct Sums {
    TileFigures scattered;
    TileFigures gathered;
    bool is_known = false;
  };
  std::vector<Sums> sums(names_.size());
  const auto add = [&](std::span<const GroupTile> tiles, std::size_t first,
                       TileFigures Sums::*half) {
    for (std::size_t t = 0; t < tiles.size(); ++t) {
      Sums& of = sums[static_cast<std::size_t>(tiles[t].parameter)];
      of.is_known = true;
      (of.*half).missed += figures[first + t].missed;
      (of.*half).wanted += figures[first + t].wanted;
    }
  };
  for (std::size_t w = 0; w < maps_.size(); ++w) {
    if (!written_[w]) continue;
    add(maps_[w].tiles(), first_tile_[w], &Sums::scattered);
    if (!gathers_) continue;
    add(maps_[w].tiles(replica), first_tile_.back() + first_tile_[w], &Sums::gathered);
  }
  std::vector<QuantizationError> errors;
  for (std::size_t p = 0; p < names_.size(); ++p) {
    if (!sums[p].is_known) continue;
    errors.push_back({names_[p], relative(sums[p].scattered), relative(sums[p].gathered)});
  }
  drop();
  return errors;
}

}  // namespace hsdp::quant
