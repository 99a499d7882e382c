// What a quantized replica hop gives, element by element, for all replicas at once: the rules of
// docs/quant_format.md and docs/loco.md, written down a second time and as simply as they can be.
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

  // sums[replica][parameter]: undivided shard sums. The means so far in this step: those of
  // parameters that travel plain are left out (empty).
  std::vector<Floats> reduce(const std::vector<std::vector<Floats>>& sums, float divisor);
  void end_step(bool clean);
  void scale_errors(float factor);
  // Between steps. Without the gathered half the means are the sums of what was sent, and nothing
  // is owed for it.
  void set_gathers(bool gathers);
  // Goes on from errors of the same parameters, whatever the options, the replicas and the cuts.
  void load(const LocoReference& from);

  [[nodiscard]] std::int64_t steps() const { return steps_; }
  [[nodiscard]] bool is_plain(std::size_t parameter) const;

 private:
  // An error is code times scale; one that is kept in fp32 has a scale of 1.
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
  // [replica, and last the gathered half's][parameter]
  std::vector<std::vector<Errors>> errors_;
  std::vector<std::vector<Errors>> next_;  // empty: nothing was reduced in this step
  std::vector<Floats> sum_;
  std::uint32_t repeat_ = 0;
  std::int64_t steps_ = 0;
};

}  // namespace hsdp::test
