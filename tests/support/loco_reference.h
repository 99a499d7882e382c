// The result of a quantized replica hop, element by element, for all replicas at once: the rules of
// docs/quant_format.md and docs/loco.md, implemented a second time and as simply as possible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "quant/loco_options.h"

namespace hsdp::test {

class LocoReference {
 public:
  using Floats = std::vector<float>;
  struct Parameter {
    std::string name;
    std::vector<std::int64_t> cuts;  // of the flattened parameter, where groups end anyway; 0
                                     // first, the count last
    int number = 0;                  // registration order
  };
  LocoReference(const quant::LocoOptions& options, int replicas, std::vector<Parameter> parameters);

  // sums[replica][parameter]: undivided shard sums. Returns the means so far in this step, empty
  // for parameters that travel unquantized.
  std::vector<Floats> reduce(const std::vector<std::vector<Floats>>& sums, float divisor);
  void end_step(bool clean);
  void scale_errors(float factor);
  // Between steps. Without the gathered half the means are the sums of what was sent, and that half
  // keeps no error.
  void set_gathers(bool gathers);
  // Continues from the errors of the same parameters, whatever the options, the replicas and the
  // cuts.
  void load(const LocoReference& from);

  [[nodiscard]] std::int64_t steps() const { return steps_; }
  [[nodiscard]] bool is_plain(std::size_t parameter) const;
  // What the errors still owe of a parameter, in units of gradients.
  [[nodiscard]] std::vector<double> owed(std::size_t parameter) const;

 private:
  // An error is code times scale. An error kept in fp32 has a scale of 1.
  struct Errors {
    Floats codes;
    Floats scales;
  };
  struct Half {
    Floats sent;  // decoded
    Errors next;
  };
  [[nodiscard]] Half quantized(const Floats& given, const Errors& errors,
                               const Parameter& parameter, quant::Code code,
                               std::uint32_t stream) const;

  quant::LocoOptions options_;
  int replicas_;
  bool gathers_ = true;
  std::vector<Parameter> parameters_;
  // [replica, or last: the gathered half][parameter]
  std::vector<std::vector<Errors>> errors_;
  std::vector<std::vector<Errors>> next_;  // empty: nothing was reduced in this step
  std::vector<Floats> sum_;
  std::uint32_t repeat_ = 0;
  std::int64_t steps_ = 0;
};

}  // namespace hsdp::test
