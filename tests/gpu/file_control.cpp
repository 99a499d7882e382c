#include "file_control.h"

#include <array>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include "hsdp/comm/control/wire_text.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"

namespace hsdp::gpu {
namespace {

using std::chrono::milliseconds;

std::optional<std::string> read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace

FileControl::FileControl(std::filesystem::path folder, int rank, int size, milliseconds timeout)
    : folder_(std::move(folder)), rank_(rank), size_(size), timeout_(timeout) {
  std::filesystem::create_directories(folder_);
  thread_ = std::thread([this] { watch(); });
}

FileControl::~FileControl() {
  closing_ = true;
  thread_.join();
}

std::filesystem::path FileControl::file(std::string_view key, std::span<const int> members,
                                        int rank) const {
  std::string name(key);
  for (const int member : members) name.append(",").append(std::to_string(member));
  for (char& c : name) c = c == '/' ? '_' : c;
  return folder_ / name.append("=").append(std::to_string(rank));
}

// Writes so that a reader sees the whole file or none.
void FileControl::write(const std::filesystem::path& path, std::string_view text) const {
  std::filesystem::path temporary = path;
  temporary += "~" + std::to_string(rank_);
  std::ofstream(temporary, std::ios::binary) << text;
  std::filesystem::rename(temporary, path);
}

void FileControl::post(std::string_view key, std::span<const int> members,
                       const comm::Saying& mine) {
  comm::WireWriter out;
  mine.encode(out);
  write(file(key, members, rank_), out.take());
}

comm::Agreement FileControl::collect(std::string_view key, std::span<const int> members,
                                     comm::WaitState waiting) {
  return *collect_until(key, members, waiting, Clock::time_point::max());
}

std::optional<comm::Agreement> FileControl::collect_within(std::string_view key,
                                                           std::span<const int> members,
                                                           comm::WaitState waiting,
                                                           std::chrono::milliseconds time) {
  return collect_until(key, members, waiting, Clock::now() + time);
}

std::optional<comm::Agreement> FileControl::collect_until(std::string_view key,
                                                          std::span<const int> members,
                                                          comm::WaitState waiting,
                                                          Clock::time_point end) {
  comm::Agreement all;
  for (const int member : members) {
    waiting.peer = member;
    const int slot = begin_wait(waiting);
    auto message = read(file(key, members, member));
    while (!message && !failed() && Clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      message = read(file(key, members, member));
    }
    end_wait(slot);
    if (!message) {
      throw_if_failed();
      return std::nullopt;
    }
    comm::WireReader in(*message);
    all.add(member, comm::Saying::decode(in));
  }
  all.close();
  return all;
}

void FileControl::tell(int peer, std::string_view topic, std::string_view message) {
  std::unique_lock lock(mutex_);
  const int number = told_[{std::string(topic), peer}]++;
  lock.unlock();
  write(file(topic, std::array{rank_, peer, number}, rank_), message);
}

std::shared_ptr<void> FileControl::listen(std::string_view topic, Hear hear) {
  auto handle = listeners_.add(topic, std::move(hear));
  const std::lock_guard lock(mutex_);
  for (int from = 0; from < size_; ++from) heard_.try_emplace({std::string(topic), from});
  return handle;
}

void FileControl::look_for_messages() {
  std::unique_lock lock(mutex_);
  const auto heard = heard_;
  lock.unlock();
  for (auto [place, number] : heard) {
    const auto& [topic, from] = place;
    while (const auto message = read(file(topic, std::array{from, rank_, number}, from))) {
      listeners_.call(topic, from, *message);
      ++number;
    }
    const std::lock_guard again(mutex_);
    heard_[place] = number;
  }
}

std::vector<comm::UniqueFd> FileControl::exchange_descriptors(std::string_view /*key*/,
                                                              std::span<const int> /*members*/,
                                                              int /*fd*/) {
  throw Error("file control: it passes no descriptors");
}

int FileControl::begin_wait(comm::WaitState state) {
  const std::lock_guard lock(mutex_);
  waits_[next_slot_] = {comm::operation_text(state.operation, state.bucket), Clock::now()};
  return next_slot_++;
}

void FileControl::end_wait(int slot) {
  const std::lock_guard lock(mutex_);
  waits_.erase(slot);
}

void FileControl::fail(const comm::Failure& failure) {
  write(folder_ / "failed", std::to_string(static_cast<int>(failure.kind)) + " " + failure.message);
  accept(failure);
}

void FileControl::accept(const comm::Failure& failure) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    failed_ = true;
  }
  const std::lock_guard lock(callbacks_->mutex);
  for (const auto& [_, wake] : std::exchange(callbacks_->wakes, {})) wake();
}

void FileControl::throw_if_failed() const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  comm::throw_failure(*failure_);
}

std::shared_ptr<void> FileControl::on_failure(std::function<void()> wake) {
  const std::lock_guard lock(callbacks_->mutex);
  const int number = callbacks_->next++;
  callbacks_->wakes[number] = std::move(wake);
  return {nullptr, [callbacks = callbacks_, number](void*) {
            const std::lock_guard inner(callbacks->mutex);
            callbacks->wakes.erase(number);
          }};
}

void FileControl::watch() {
  while (!closing_) {
    std::this_thread::sleep_for(milliseconds(20));
    if (!failed()) look_for_messages();
    if (!failed()) look();
  }
}

void FileControl::look() {
  if (const auto text = read(folder_ / "failed")) {
    std::istringstream in(*text);
    int kind = 0;
    in >> kind;
    const std::size_t begin = text->find(' ') + 1;
    return accept({static_cast<comm::FailureKind>(kind), text->substr(begin), {}});
  }
  std::optional<comm::Failure> late;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [_, wait] : waits_) {
      if (Clock::now() - wait.since < timeout_) continue;
      late = {comm::FailureKind::kTimeout,
              wait.operation + ": timed out on rank " + std::to_string(rank_),
              {}};
    }
  }
  if (late) fail(*late);
}

}  // namespace hsdp::gpu
