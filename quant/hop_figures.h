// How far a step's quantized gradients were from the originals, by parameter.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "hsdp/device/buffer.h"
#include "quant/group_map.h"
#include "quant/quantization_error.h"
#include "quant/quantize.h"

namespace hsdp::quant {

class HopFigures {
 public:
  HopFigures() = default;
  // `gathers`: there is a gathered half.
  HopFigures(std::vector<std::string> names, std::vector<GroupMap> maps, bool gathers,
             Device device);

  struct Window {
    TileFigures* scattered = nullptr;  // of all its tiles
    TileFigures* gathered = nullptr;   // of those that this replica owns; or null
  };
  // Where a window's next reduction writes its figures.
  [[nodiscard]] Window next(std::size_t window);
  // Discards what this step has written.
  void drop();
  // Returns and discards what this step has written. The device must have finished with it.
  [[nodiscard]] std::vector<QuantizationError> take(int replica);

 private:
  std::vector<std::string> names_;
  std::vector<GroupMap> maps_;
  std::vector<std::size_t> first_tile_;  // of each window, and the end
  std::vector<bool> written_;
  bool gathers_ = false;
  Buffer memory_;  // scattered, then gathered
};

}  // namespace hsdp::quant
