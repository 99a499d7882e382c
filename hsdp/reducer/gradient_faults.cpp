#include "hsdp/reducer/gradient_faults.h"

#include <iterator>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/index_check.h"
#include "hsdp/kernels/cast_and_pack.h"

namespace hsdp::reducer {

void GradientFaults::require_fits(int parameter, const StridedView& gradient) const {
  check_index("reducer: gradient_ready", "a parameter index below", parameter, parameters_.size());
  const ParameterSpec& spec = parameters_.spec(parameter);
  const auto fault = [&spec](const std::string& expected, const std::string& got,
                             const std::string& remedy = {}) {
    const std::string where = "reducer: gradient of '" + spec.name + "'";
    throw UsageError({.where = where, .expected = expected, .got = got, .remedy = remedy});
  };
  if (gradient.shape != spec.shape) {
    fault("shape " + to_string(spec.shape), to_string(gradient.shape));
  }
  if (gradient.dtype != spec.dtype) {
    fault("dtype " + std::string(name(spec.dtype)) + " as registered",
          std::string(name(gradient.dtype)));
  }
  if (!(gradient.device == groups_.device)) {
    fault("memory on " + to_string(groups_.device) + ", the mesh's device",
          to_string(gradient.device), "move it there, or make the mesh with its device");
  }
  if (!gradient.strides.empty() && gradient.strides.size() != gradient.shape.size()) {
    fault(std::to_string(gradient.shape.size()) + " strides",
          std::to_string(gradient.strides.size()));
  }
  if (gradient.data == nullptr && gradient.count() > 0) fault("memory", "a null pointer");
  kernels::require_packable(gradient);
}

std::string GradientFaults::too_many(int parameter, const WindowOptions* window) const {
  Message message{.where = "reducer: gradient of '" + parameters_.spec(parameter).name + "'",
                  .expected = "one gradient per microbatch",
                  .got = "a second one",
                  .remedy = "use backwards=\"many\" or a window for several backward passes"};
  if (window == nullptr) return message.text();
  const std::string most =
      window->backwards ? "at most " + std::to_string(*window->backwards) : std::string();
  if (window->accumulate == Accumulate::kBuffer) {
    message.expected = most + " in its window, as backwards says";
    message.got = "one more";
  } else {
    message.expected = "one sum of its window's gradients";
    if (window->backwards) message.expected += ", of " + most + " as backwards says";
  }
  message.remedy = window->backwards ? "give backwards the number of passes, or leave it out"
                                     : "add them up and hand the sum over once";
  return message.text();
}

std::string GradientFaults::missing(const Collector& collector, const MicrobatchPlan& plan,
                                    bool in_window) const {
  if (plan.intake.is_empty) return unexpected(collector);
  if (options_.missing != Missing::kError) return {};
  const std::vector<int> missing = collector.missing();
  if (missing.empty()) return {};
  const std::string rank = comm::ranks_text({groups_.world.rank()}, groups_.world.size());
  const std::string place = in_window ? "window" : "microbatch";
  Message message{.where = "reducer: end_" + place,
                  .expected = "a gradient for every parameter",
                  .got = "none at all (" + rank + ")",
                  .remedy =
                      "run the backward pass (loss.backward()), or call gradient_ready, inside "
                      "the " +
                      place + ", or use missing=\"zero\" when parameters may go unused"};
  if (std::ssize(missing) < parameters_.size()) {
    std::string names = "'" + parameters_.spec(missing.front()).name + "'";
    if (missing.size() > 1) names += " and " + std::to_string(missing.size() - 1) + " more";
    message.got = "none for " + names + " (" + rank + ")";
    message.remedy = "use missing=\"zero\" when parameters may go unused";
  }
  return message.text();
}

std::string GradientFaults::unexpected(const Collector& collector) const {
  if (!collector.any_arrived()) return {};
  return Message{
      .where = "reducer: end_microbatch",
      .expected = "no gradient in a microbatch without a batch",
      .got = "some (" + comm::ranks_text({groups_.world.rank()}, groups_.world.size()) + ")",
      .remedy = "run no backward pass where the loader gives None"}
      .text();
}

}  // namespace hsdp::reducer
