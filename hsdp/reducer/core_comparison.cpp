// What the ranks compare when a Reducer is made: its options. Each rank says even what is wrong
// with its own, so that a mistake of one is an error on all of them at once.
#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/reducer/core.h"

namespace hsdp {
namespace {

constexpr char kFaultMark = '!';  // no options begin with it

std::string options_text(const ReducerOptions& options) {
  const auto dtype = [](const std::optional<Dtype>& d) {
    return d ? std::string(name(*d)) : std::string("own");
  };
  return "reduce_dtype " + dtype(options.reduce_dtype) + ", replica_dtype " +
         dtype(options.replica_dtype) + ", layout " + std::string(name(options.layout)) +
         ", bucket_bytes " + std::to_string(options.bucket_bytes.value_or(0)) + ", reduction " +
         options.reduction + ", replica_hop " + std::string(options.replica_hop->name()) +
         ", missing " + (options.missing == Missing::kError ? "error" : "zero") + ", backwards " +
         (options.backwards == Backwards::kOne ? "one" : "many") + ", accumulate_dtype " +
         (options.accumulate_dtype == AccumulateDtype::kF32 ? "f32" : "param");
}

void check_options(const ReducerOptions& options, std::string_view engine) {
  for (const std::optional<Dtype>& dtype : {options.reduce_dtype, options.replica_dtype}) {
    if (dtype && !is_gradient_dtype(*dtype)) {
      throw UsageError(
          "reducer: expected reduce_dtype and replica_dtype of f32, bf16 or f16, got " +
          std::string(name(*dtype)));
    }
  }
  const std::optional<Dtype> sent = options.replica_hop->wire();
  if (sent && !is_gradient_dtype(*sent)) {
    throw UsageError("reducer: replica_hop: expected a wire of f32, bf16 or f16, got " +
                     std::string(name(*sent)));
  }
  if (sent && options.replica_dtype && *sent != *options.replica_dtype) {
    throw UsageError("reducer: replica_dtype: expected " + std::string(name(*sent)) +
                     ", which the replica_hop sends, got " +
                     std::string(name(*options.replica_dtype)) + "; give one of the two");
  }
  if (options.bucket_bytes && *options.bucket_bytes < 1) {
    throw UsageError("reducer: expected bucket_bytes of at least 1, got " +
                     std::to_string(*options.bucket_bytes));
  }
  if (options.reduction != "exact" && options.reduction != "native") {
    throw UsageError("reducer: expected reduction 'exact' or 'native', got '" + options.reduction +
                     "'");
  }
  if (options.reduction == "native" && engine != "nccl") {
    throw UsageError("reducer: reduction 'native' is the nccl engine's; expected 'exact' on the " +
                     std::string(engine) + " engine");
  }
}

}  // namespace

// Every rank sees the difference, so that none goes on to wait for one that stopped here.
void Reducer::Core::compare_options() {
  // A rank that finds its own options wrong tells the others before it throws, so that nobody waits
  // for it.
  std::string fault;
  try {
    check_options(options_, world_.engine_name());
    if (!options_.replica_dtype) options_.replica_dtype = options_.replica_hop->wire();
  } catch (const UsageError& error) {
    fault = error.what();
  }
  const std::string mine =
      fault.empty() ? options_text(options_) + '\n' + new_snapshot_id() : kFaultMark + fault;
  const std::vector<std::string> all = world_.exchange(mine, "Reducer");
  if (!fault.empty()) throw UsageError(fault);
  for (int r = 0; r < world_.size(); ++r) {
    const std::string& text = all[static_cast<std::size_t>(r)];
    if (!text.starts_with(kFaultMark)) continue;
    throw MismatchError("reducer: " + comm::ranks_text({r}, world_.size()) +
                            " could not make its Reducer: " + text.substr(1),
                        {world_.world_ranks()[static_cast<std::size_t>(r)]});
  }
  const auto options_of = [&all](int r) {
    const std::string& text = all[static_cast<std::size_t>(r)];
    return text.substr(0, text.find('\n'));
  };
  snapshot_id_ = all.front().substr(options_of(0).size() + 1);
  for (int r = 0; r < world_.size(); ++r) {
    if (options_of(r) == options_of(0)) continue;
    throw MismatchError("reducer: expected the options of rank 0 (" + options_of(0) + "), got " +
                            options_of(r) + " (" + comm::ranks_text({r}, world_.size()) + ")",
                        {world_.world_ranks()[static_cast<std::size_t>(r)]});
  }
}

}  // namespace hsdp
