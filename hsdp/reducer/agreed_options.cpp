#include "hsdp/reducer/agreed_options.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/reducer/compare_lines.h"
#include "hsdp/reducer/together.h"
#include "hsdp/snapshot.h"

namespace hsdp::reducer {
namespace {

struct OptionText {
  std::string operator()(const std::optional<Dtype>& dtype) const {
    return dtype ? std::string(name(*dtype)) : "own";
  }
  std::string operator()(const std::optional<std::int64_t>& number) const {
    return std::to_string(number.value_or(0));
  }
  std::string operator()(const std::string& text) const { return text; }
  std::string operator()(const std::shared_ptr<ReplicaHop>& hop) const { return hop->describe(); }
  template <typename Value>
  std::string operator()(const Value& value) const {
    return std::string(word_of(value));
  }
};

// "reduce_dtype bf16, replica_dtype own, ...".
std::string options_text(const ReducerOptions& options) {
  std::string text;
  visit_fields(options, [&text](const char* name, const auto& value) {
    text += (text.empty() ? "" : ", ") + std::string(name) + " " + OptionText{}(value);
  });
  return text;
}

void check_options(const ReducerOptions& options, Device device, std::string_view engine) {
  for (const std::optional<Dtype>& dtype : {options.reduce_dtype, options.replica_dtype}) {
    if (dtype && !is_gradient_dtype(*dtype)) {
      throw UsageError({.where = "reducer",
                        .expected = "reduce_dtype and replica_dtype of f32, bf16 or f16",
                        .got = std::string(name(*dtype))});
    }
  }
  check_description(options.replica_hop->describe());
  const std::optional<Dtype> sent = options.replica_hop->wire();
  if (sent && !is_gradient_dtype(*sent)) {
    throw UsageError({.where = "reducer: replica_hop",
                      .expected = "a wire of f32, bf16 or f16",
                      .got = std::string(name(*sent))});
  }
  if (sent && options.replica_dtype && *sent != *options.replica_dtype) {
    throw UsageError({.where = "reducer: replica_dtype",
                      .expected = std::string(name(*sent)) + ", which the replica_hop sends",
                      .got = std::string(name(*options.replica_dtype)),
                      .remedy = "give one of the two"});
  }
  if (options.bucket_bytes && *options.bucket_bytes < 1) {
    throw UsageError({.where = "reducer",
                      .expected = "bucket_bytes of at least 1",
                      .got = std::to_string(*options.bucket_bytes)});
  }
  if (options.accumulate_on == AccumulateOn::kHost && device.type == DeviceType::kHost) {
    throw UsageError({.where = "reducer: accumulate_on",
                      .expected = "'host' beside a GPU, whose memory it spares",
                      .got = "a mesh on the cpu",
                      .remedy = "leave it out"});
  }
  if (options.reduction != "exact" && options.reduction != "native") {
    throw UsageError({.where = "reducer",
                      .expected = "reduction 'exact' or 'native'",
                      .got = "'" + options.reduction + "'"});
  }
  if (options.reduction == "native" && engine != "nccl") {
    throw UsageError({.where = "reducer",
                      .expected = "reduction 'exact' on the " + std::string(engine) + " engine",
                      .got = "'native', which only the nccl engine has"});
  }
}

ReducerOptions with_defaults(ReducerOptions options, Device device) {
  if (!options.replica_hop) options.replica_hop = std::make_shared<PlainHop>();
  if (!options.bucket_bytes) {
    const bool on_host = device.type == DeviceType::kHost;
    options.bucket_bytes = on_host ? kHostBucketBytes : kGpuBucketBytes;
  }
  return options;
}

}  // namespace

void check_description(const std::string& text) {
  constexpr std::size_t kMaxBytes = 127;
  const bool is_line = std::ranges::none_of(
      text, [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7F'; });
  if (!text.empty() && text.size() <= kMaxBytes && is_line && is_snapshot_text(text)) return;
  throw UsageError({.where = "reducer: replica_hop",
                    .expected = "its description in one line of UTF-8 of 1 to " +
                                std::to_string(kMaxBytes) + " bytes",
                    .got = std::to_string(text.size()) + " bytes" +
                           (is_line ? "" : " with a line break or control character")});
}

AgreedOptions agree_on_options(ReducerOptions options, Device device, Communicator& world) {
  AgreedOptions agreed{with_defaults(std::move(options), device), {}};
  std::string own;
  together(world, "make its Reducer", [&] {
    check_options(agreed.options, device, world.engine_name());
    if (!agreed.options.replica_dtype) {
      agreed.options.replica_dtype = agreed.options.replica_hop->wire();
    }
    own = options_text(agreed.options);
  });
  if (const auto difference = compare_lines(world, {own}, "Reducer")) {
    const std::string rank = comm::ranks_text({difference->rank}, world.size());
    throw MismatchError({.where = "reducer",
                         .expected = "the options of rank 0 (" + difference->expected + ")",
                         .got = difference->got + " (" + rank + ")"},
                        {world.world_rank(difference->rank)});
  }
  agreed.snapshot_id = world.exchange(new_snapshot_id(), "Reducer").front();
  return agreed;
}

}  // namespace hsdp::reducer
