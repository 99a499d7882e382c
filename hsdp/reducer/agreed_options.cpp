#include "hsdp/reducer/agreed_options.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/reducer/compare_lines.h"
#include "hsdp/reducer/flight_watch.h"
#include "hsdp/reducer/together.h"
#include "hsdp/snapshot.h"

namespace hsdp::reducer {
namespace {

std::string in_quotes(std::string_view text) { return '"' + std::string(text) + '"'; }

// An option as Python writes it.
struct OptionText {
  std::string operator()(const std::optional<Dtype>& dtype) const {
    return dtype ? in_quotes(name(*dtype)) : "None";
  }
  std::string operator()(const std::optional<std::int64_t>& number) const {
    return std::to_string(number.value_or(0));
  }
  std::string operator()(std::int64_t number) const { return std::to_string(number); }
  std::string operator()(const std::string& text) const { return in_quotes(text); }
  std::string operator()(const std::shared_ptr<ReplicaHop>& hop) const { return hop->describe(); }
  template <typename Value>
  std::string operator()(const Value& value) const {
    return in_quotes(word_of(value));
  }
};

// One line per option: "reduce_dtype=\"bf16\"".
std::vector<std::string> option_lines(const ReducerOptions& options) {
  std::vector<std::string> lines;
  visit_fields(options, [&lines](const char* name, const auto& value) {
    lines.push_back(std::string(name) + "=" + OptionText{}(value));
  });
  return lines;
}

constexpr std::size_t kMaxTextBytes = 127;

bool is_line(const std::string& text) {
  const bool has_control = std::ranges::any_of(
      text, [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7F'; });
  return !has_control && text.size() <= kMaxTextBytes && is_snapshot_text(text);
}

// The text of a size, for errors.
std::string size_text(const std::string& text) {
  const bool is_long = text.size() > kMaxTextBytes;
  return std::to_string(text.size()) + " bytes" +
         (is_long || is_line(text) ? "" : " with a line break, control character or broken UTF-8");
}

void check_options(const ReducerOptions& options, Device device, std::string_view engine) {
  if (!is_line(options.name)) {
    throw UsageError(
        {.where = "reducer: name",
         .expected = "one line of UTF-8 of at most " + std::to_string(kMaxTextBytes) + " bytes",
         .got = size_text(options.name)});
  }
  for (const std::optional<Dtype>& dtype : {options.reduce_dtype, options.replica_dtype}) {
    if (dtype && !sums_in_f32(*dtype)) {
      throw UsageError({.where = "reducer: reduce_dtype and replica_dtype",
                        .expected = "f32, bf16 or f16",
                        .got = std::string(name(*dtype))});
    }
  }
  check_description(options.replica_hop->describe());
  const std::optional<Dtype> sent = options.replica_hop->wire();
  if (sent && !sums_in_f32(*sent)) {
    throw UsageError({.where = "reducer: replica_hop",
                      .expected = "a wire dtype of f32, bf16 or f16",
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
  if (options.verify_every < 0) {
    throw UsageError({.where = "reducer",
                      .expected = "verify_every of at least 1, or 0 for no step",
                      .got = std::to_string(options.verify_every)});
  }
  if (options.accumulate_on == AccumulateOn::kHost && device.type == DeviceType::kHost) {
    throw UsageError({.where = "reducer: accumulate_on",
                      .expected = "'host' beside a GPU, whose memory it spares",
                      .got = "a mesh on the cpu",
                      .remedy = "leave it out"});
  }
  if (options.reduction != "exact" && options.reduction != "native") {
    throw UsageError({.where = "reducer: reduction",
                      .expected = "'exact' or 'native'",
                      .got = "'" + options.reduction + "'"});
  }
  if (options.reduction == "native" && engine != "nccl") {
    throw UsageError({.where = "reducer",
                      .expected = "reduction 'exact' on the " + std::string(engine) + " engine",
                      .got = "'native', which only the nccl engine has",
                      .remedy = "leave reduction out"});
  }
}

}  // namespace

std::string title(const ReducerOptions& options) {
  return options.name.empty() ? "reducer" : "reducer '" + options.name + "'";
}

ReducerOptions with_defaults(ReducerOptions options, Device device, int rank_count) {
  if (!options.replica_hop) options.replica_hop = std::make_shared<PlainHop>();
  if (!options.bucket_bytes) {
    options.bucket_bytes = default_bucket_bytes(device.type, rank_count);
  }
  return options;
}

void check_description(const std::string& text) {
  if (!text.empty() && is_line(text)) return;
  throw UsageError({.where = "reducer: replica_hop",
                    .expected = "its description in one line of UTF-8 of 1 to " +
                                std::to_string(kMaxTextBytes) + " bytes",
                    .got = size_text(text)});
}

AgreedOptions agree_on_options(ReducerOptions options, Device device, Communicator& world) {
  AgreedOptions agreed{with_defaults(std::move(options), device, world.size()), {}};
  std::vector<std::string> own;
  together(world, "make its Reducer", [&] {
    check_options(agreed.options, device, world.engine_name());
    start_flight_writer();
    if (!agreed.options.replica_dtype) {
      agreed.options.replica_dtype = agreed.options.replica_hop->wire();
    }
    own = option_lines(agreed.options);
  });
  if (const auto difference = compare_lines(world, own, "compare its Reducer's options")) {
    const std::string rank = comm::ranks_text({difference->rank}, world.size());
    throw MismatchError({.where = "reducer",
                         .expected = difference->expected + " on every rank",
                         .got = difference->got + " on " + rank,
                         .remedy = "make the same Reducers with the same options, in the same "
                                   "order on every rank"},
                        {world.world_rank(difference->rank)});
  }
  agreed.snapshot_id = world.exchange(new_snapshot_id(), "share its snapshots' id").front();
  return agreed;
}

}  // namespace hsdp::reducer
