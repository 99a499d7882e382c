// How far the quantized gradients of a step were from those that it was given, by parameter.
//
// Not thread-safe.
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
  HopFigures(std::vector<std::string> names, std::vector<GroupMap> maps, Device device);

  struct Window {
    TileFigures* scattered = nullptr;  // of all its tiles
    TileFigures* gathered = nullptr;   // of those that this replica owns
  };
  // Where a window's next reduction writes them.
  [[nodiscard]] Window next(std::size_t window);
  // Forgets what was written in this step.
  void drop();
  // What was written in this step, which the device is done with, and forgets it.
  [[nodiscard]] std::vector<QuantizationError> take(int replica);

 private:
  std::vector<std::string> names_;
  std::vector<GroupMap> maps_;
  std::vector<std::size_t> first_tile_;  // of each window, and the end
  std::vector<bool> written_;
  Buffer memory_;  // scattered, then gathered
};

}  // namespace hsdp::quant
