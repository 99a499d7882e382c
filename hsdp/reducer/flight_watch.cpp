#include "hsdp/reducer/flight_watch.h"

#include <pthread.h>
#include <semaphore.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "hsdp/comm/engine.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/device/all_signals_blocked.h"

namespace hsdp {
namespace {

// Set by the signal handler, which may do no more.
sem_t something_to_write;
std::atomic<bool> was_signalled{false};
static_assert(std::atomic<bool>::is_always_lock_free);

extern "C" void ask_for_flight_record(int /*signal*/) {
  const int error = errno;
  was_signalled = true;
  ::sem_post(&something_to_write);
  errno = error;
}

// Leaves a handler of the application in place.
void listen_to_signal() {
  struct sigaction now {};
  if (::sigaction(SIGUSR1, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction ours {};
  ours.sa_handler = ask_for_flight_record;
  ours.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR1, &ours, nullptr);
}

}  // namespace

class FlightWatch {
 public:
  explicit FlightWatch(FlightOrigin origin) : origin_(std::move(origin)) {
    on_failure_ = control().on_failure([] { ::sem_post(&something_to_write); });
  }
  [[nodiscard]] comm::Control& control() const { return origin_.world.engine()->control(); }
  // True once, when the world has ended.
  [[nodiscard]] bool take_failed() const {
    return control().failed() && !std::exchange(has_failed_, true);
  }

  void write(const std::filesystem::path& folder, const char* reason) const {
    try {
      write_flight_record(origin_, folder, reason);
    } catch (const std::exception& error) {  // no caller to throw it to
      std::fprintf(stderr, "hsdp: %s\n", error.what());
    }
  }

 private:
  FlightOrigin origin_;
  mutable bool has_failed_ = false;  // under the writer's lock
  std::shared_ptr<void> on_failure_;
};

namespace {

class FlightWriter {
 public:
  explicit FlightWriter(std::filesystem::path folder) : folder_(std::move(folder)) {
    ::sem_init(&something_to_write, 0, 0);
    const AllSignalsBlocked blocked;
    thread_ = std::thread([this] { work(); });
    pthread_setname_np(thread_.native_handle(), "hsdp-flight");
    listen_to_signal();
  }
  [[nodiscard]] bool is_of_this_process() const {
    return comm::fork_generation() == generation_;  // a child has no such thread
  }
  // At the process's exit.
  void stop() {
    if (!is_of_this_process()) return;
    closing_ = true;
    ::sem_post(&something_to_write);
    timespec until{};
    ::clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += kPatience.count();
    if (::pthread_timedjoin_np(thread_.native_handle(), nullptr, &until) != 0) return;
    const std::unique_lock lock(mutex_, kPatience);
    if (lock) write_failed();
  }
  // A record that another run left of this rank would be taken for this run's.
  void add(const FlightWatch* watch) {
    const std::scoped_lock lock(mutex_);
    const bool is_first = std::ranges::none_of(
        watches_, [&](const FlightWatch* one) { return &one->control() == &watch->control(); });
    std::error_code error;
    if (is_first) std::filesystem::remove(flight_path(folder_, watch->control().rank()), error);
    watches_.insert(watch);
  }
  // Whether that was the last user.
  [[nodiscard]] bool remove(const FlightWatch* watch) {
    const std::unique_lock lock(mutex_, kPatience);
    if (!lock) return false;
    write_failed();
    watches_.erase(watch);
    return true;
  }

 private:
  // How long to wait for a disk that does not answer.
  static constexpr std::chrono::seconds kPatience{5};

  void work() {
    while (!closing_) {
      if (::sem_wait(&something_to_write) != 0) continue;
      const std::scoped_lock lock(mutex_);
      write_failed();
      if (was_signalled.exchange(false))
        write_each("signal", [](const FlightWatch&) { return true; });
    }
  }
  void write_failed() {
    write_each("failure", [](const FlightWatch& watch) { return watch.take_failed(); });
  }
  // Once for each world, which may have several watches.
  template <typename Wanted>
  void write_each(const char* reason, const Wanted& wanted) {
    std::set<const comm::Control*> written;
    for (const FlightWatch* const watch : watches_) {
      if (wanted(*watch) && written.insert(&watch->control()).second) watch->write(folder_, reason);
    }
  }

  const std::filesystem::path folder_;
  const std::uint32_t generation_ = comm::fork_generation();
  std::atomic<bool> closing_{false};
  std::timed_mutex mutex_;
  std::set<const FlightWatch*> watches_;
  std::thread thread_;
};

// Never destroyed, as a signal or a Reducer may come late. Its thread ends at exit.
FlightWriter* flight_writer = nullptr;

}  // namespace

void start_flight_writer() {
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  if (flight_writer != nullptr) return;
  const std::optional<std::string> folder = comm::process_variable("HSDP_FLIGHT_DIR");
  if (!folder || folder->empty()) return;
  const std::filesystem::path path = std::filesystem::absolute(*folder);
  make_flight_folder(path);
  flight_writer = new FlightWriter(path);
  static const struct AtExit {
    AtExit() = default;
    AtExit(const AtExit&) = delete;
    AtExit& operator=(const AtExit&) = delete;
    ~AtExit() { flight_writer->stop(); }
  } at_exit;
}

std::shared_ptr<const FlightWatch> watch_flight(const Mesh& mesh) {
  if (flight_writer == nullptr || !flight_writer->is_of_this_process()) return nullptr;
  auto watch = std::make_unique<FlightWatch>(
      FlightOrigin{mesh.world(), mesh.replicate_size(), mesh.shard_size()});
  flight_writer->add(watch.get());
  return {watch.release(), [](const FlightWatch* one) {
            if (flight_writer->remove(one)) delete one;
          }};
}

}  // namespace hsdp
