#include "hsdp/mesh.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/operation_record.h"
#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/comm/timeout_range.h"
#include "hsdp/error.h"
#include "hsdp/log.h"

namespace hsdp {
namespace {

std::string size_text(const MeshOptions& options) {
  return std::to_string(options.replicate) + " x " + std::to_string(options.shard);
}

void check_sizes(const MeshOptions& options) {
  if (options.replicate < 1 || options.shard < 1) {
    throw UsageError({.where = "mesh",
                      .expected = "replicate and shard of at least 1",
                      .got = size_text(options)});
  }
}

void check_timeout(const MeshOptions& options) {
  comm::require_timeout(std::chrono::duration<double>(options.timeout_s), "mesh: timeout_s");
}

void check_engine(const MeshOptions& options, std::string_view engine) {
  if (options.engine != "auto" && options.engine != engine) {
    throw UsageError({.where = "mesh: engine",
                      .expected = "'" + std::string(engine) + "', as in the job's world, or 'auto'",
                      .got = "'" + options.engine + "'",
                      .remedy = "give every mesh of a job the same engine"});
  }
  if (options.device.type == DeviceType::kHost && options.device.index != 0) {
    throw UsageError({.where = "mesh: device",
                      .expected = "index 0 of the cpu",
                      .got = std::to_string(options.device.index)});
  }
  const bool only_host_memory = engine == "host" || engine == "mpi";
  if (!only_host_memory || options.device == Device{}) return;
  throw UsageError({.where = "mesh: device",
                    .expected = "cpu on the " + std::string(engine) + " engine",
                    .got = to_string(options.device),
                    .remedy = "use engine 'nccl' for GPUs"});
}

// The job ranks of the mesh in world order (replica major), from `ranks` or the whole job.
std::vector<int> world_order(const MeshOptions& options, int job_rank, int job_size) {
  std::vector<int> order;
  if (options.ranks.empty()) {
    if (std::int64_t{options.replicate} * options.shard != job_size) {
      throw UsageError(
          {.where = "mesh",
           .expected = "replicate x shard equal to the world of " + std::to_string(job_size),
           .got = size_text(options),
           .remedy = "start that many processes, or name the mesh's ranks with ranks="});
    }
    for (int r = 0; r < job_size; ++r) order.push_back(r);
    return order;
  }
  if (static_cast<int>(options.ranks.size()) != options.replicate) {
    throw UsageError({.where = "mesh: ranks",
                      .expected = "an array of " + size_text(options),
                      .got = std::to_string(options.ranks.size()) + " rows"});
  }
  for (const std::vector<int>& row : options.ranks) {
    if (static_cast<int>(row.size()) != options.shard) {
      throw UsageError({.where = "mesh: ranks",
                        .expected = "an array of " + size_text(options),
                        .got = "a row of " + std::to_string(row.size())});
    }
    order.insert(order.end(), row.begin(), row.end());
  }
  std::set<int> seen;
  for (const int rank : order) {
    if (rank < 0 || rank >= job_size) {
      throw UsageError({.where = "mesh: ranks",
                        .expected = "ranks of the job from 0 to " + std::to_string(job_size - 1),
                        .got = std::to_string(rank)});
    }
    if (!seen.insert(rank).second) {
      throw UsageError({.where = "mesh: ranks",
                        .expected = "every rank once",
                        .got = "rank " + std::to_string(rank) + " twice"});
    }
  }
  if (!seen.contains(job_rank)) {
    throw UsageError({.where = "mesh: ranks",
                      .expected = "rank " + std::to_string(job_rank) + " of this process in it",
                      .got = "an array without",
                      .remedy = "pass the array that holds its own rank in each process"});
  }
  return order;
}

// The transports are those of this rank.
void log_mesh(const Mesh& mesh, const MeshOptions& options, int job_size) {
  if (mesh.rank() != 0 || !is_logged(LogLevel::kInfo)) return;
  const comm::Control& control = mesh.world().engine()->control();
  std::set<int> hosts;
  for (const int rank : mesh.world().world_ranks()) hosts.insert(control.host_of(rank));
  const auto over = [](const Communicator& group) { return std::string(name(group.transport())); };
  log_line(LogLevel::kInfo,
           "mesh " + size_text(options) + ": ranks " + std::to_string(mesh.size()) + " of " +
               std::to_string(job_size) + ", hosts " + std::to_string(hosts.size()) + ", engine " +
               std::string(mesh.world().engine_name()) + ", device " + to_string(mesh.device()) +
               ", shard group over " + over(mesh.shard_group()) + ", replicate group over " +
               over(mesh.replicate_group()));
}

constexpr std::string_view kRanksFollow = " of job ranks";

std::string describe(const MeshOptions& options, const std::vector<int>& order) {
  std::string text = size_text(options) + std::string(kRanksFollow);
  for (const int rank : order) text += ' ' + std::to_string(rank);
  return text;
}

std::vector<int> order_in(const std::string& description) {
  std::istringstream text(
      description.substr(description.rfind(kRanksFollow) + kRanksFollow.size()));
  return {std::istream_iterator<int>(text), {}};
}

// When this process made its first mesh, by its clock. A forked child begins another job.
std::string begin_text() {
  static std::mutex mutex;
  static std::map<std::uint32_t, std::string> begins;  // by fork generation
  const std::scoped_lock lock(mutex);
  std::string& begin = begins[comm::fork_generation()];
  if (begin.empty()) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    begin = std::to_string(std::chrono::nanoseconds(now).count());
  }
  return begin;
}

// Rank 0 names the job; the others say nothing.
std::string own_name(const Communicator& job) {
  if (job.rank() != 0) return {};
  return job.engine()->control().operations()->name_job(begin_text());
}

void take_name(const Communicator& job, std::vector<std::string>& texts) {
  const std::string& first = texts.front();
  job.engine()->control().operations()->name_job(first.substr(0, first.find('\n')));
  for (std::string& text : texts) text.erase(0, text.find('\n') + 1);
}

// Every rank checks all of them, so that no rank goes on into a split that others have left.
void check_agreement(const std::vector<std::string>& all, const std::vector<int>& members) {
  const auto size = all.size();
  const auto of_size = [size](std::size_t r) {
    return std::to_string(r) + " of " + std::to_string(size);
  };
  for (std::size_t r = 0; r < size; ++r) {
    if (!all[r].starts_with('!')) continue;
    throw MismatchError(
        "mesh: rank " + of_size(r) + " could not make its mesh: " + all[r].substr(1), {members[r]});
  }
  for (std::size_t r = 0; r < size; ++r) {
    for (const int member : order_in(all[r])) {
      const auto m = static_cast<std::size_t>(member);
      if (all[m] == all[r]) continue;
      const std::size_t later = std::max(r, m);
      throw MismatchError(
          {.where = "mesh",
           .expected = "'" + all[std::min(r, m)] + "' on every rank",
           .got = "'" + all[later] + "' on rank " + of_size(later),
           .remedy = "pass the same replicate, shard and ranks on all ranks of a mesh"},
          {members[later]});
    }
  }
}

}  // namespace

struct Mesh::State {
  MeshOptions options;
  int rank = 0;
  Communicator world;
  Communicator shard_group;
  Communicator replicate_group;
};

Mesh::Mesh(const Communicator& job, const MeshOptions& options)
    : state_(std::make_shared<State>()) {
  Communicator parent = job;
  const std::vector<int>& members = job.world_ranks();
  // A rank with invalid arguments tells the others before it throws, so that none waits for a split
  // that never comes.
  std::vector<int> order;
  std::string fault;
  try {
    check_sizes(options);
    check_timeout(options);
    check_engine(options, job.engine_name());
    read_log_level();
    order = world_order(options, job.rank(), job.size());
  } catch (const UsageError& error) {
    fault = error.what();
  }
  const std::string mine = fault.empty() ? describe(options, order) : "!" + fault;
  std::vector<std::string> all = parent.exchange(own_name(job) + "\n" + mine, "init_mesh");
  take_name(job, all);
  if (!fault.empty()) throw UsageError(fault);
  check_agreement(all, members);
  const auto place = std::ranges::find(order, job.rank()) - order.begin();
  State& state = *state_;
  state.options = options;
  state.options.timeout_s =
      std::chrono::duration<double>(job.engine()->control().timeout()).count();
  state.rank = static_cast<int>(place);
  state.world = parent.split(order.front(), state.rank);
  state.shard_group = state.world.split(replica(), shard_rank());
  state.replicate_group = state.world.split(shard_rank(), replica());
  log_mesh(*this, options, job.size());
}

Mesh::State& Mesh::state() const {
  if (state_ && state_->world) return *state_;
  throw UsageError({.where = "mesh",
                    .expected = "an open mesh",
                    .got = "a closed one",
                    .remedy = "make a new one"});
}

int Mesh::rank() const { return state_->rank; }
int Mesh::size() const { return replicate_size() * shard_size(); }
int Mesh::replica() const { return rank() / shard_size(); }
int Mesh::shard_rank() const { return rank() % shard_size(); }
int Mesh::replicate_size() const { return state_->options.replicate; }
int Mesh::shard_size() const { return state_->options.shard; }
double Mesh::timeout_s() const { return state_->options.timeout_s; }
Device Mesh::device() const { return state_->options.device; }

Communicator& Mesh::world() const { return state().world; }
Communicator& Mesh::shard_group() const { return state().shard_group; }
Communicator& Mesh::replicate_group() const { return state().replicate_group; }

void Mesh::close() {
  if (!state_) return;
  state_->replicate_group = {};
  state_->shard_group = {};
  state_->world = {};
}

bool Mesh::closed() const { return !state_ || !state_->world; }

namespace {

// The variables may be stale ones of another launcher.
std::string with_size_source(const std::string& message) {
  try {
    return message + " (the job's size is " + comm::size_source(comm::detect_launch()) + ")";
  } catch (const Error&) {  // no descriptor is free to detect the launcher
    return message;
  }
}

}  // namespace

Mesh init_mesh(const MeshOptions& options) {
  check_timeout(options);  // the other options are checked once all ranks can be told
  WorldOptions world;
  world.engine = options.engine;
  world.device = options.device;
  world.timeout = std::chrono::milliseconds(std::llround(options.timeout_s * 1000));
  world.transport = options.transport;
  const Communicator job = connect_world(world);
  try {
    return {job, options};
  } catch (const UsageError& error) {
    const bool fits = std::int64_t{options.replicate} * options.shard == job.size();
    if (fits || !options.ranks.empty()) throw;
    throw UsageError(with_size_source(error.what()));
  }
}

}  // namespace hsdp
