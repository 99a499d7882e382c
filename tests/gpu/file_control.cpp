#include "file_control.h"

#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::gpu {
namespace {

using std::chrono::milliseconds;

std::optional<std::string> read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string describe(const comm::WaitState& state) {
  std::string text(state.operation);
  if (state.bucket >= 0) text += " of bucket " + std::to_string(state.bucket);
  return text;
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
  for (const int member : members) name += "," + std::to_string(member);
  for (char& c : name) c = c == '/' ? '_' : c;
  return folder_ / (name + "=" + std::to_string(rank));
}

// A reader sees all of it or nothing.
void FileControl::write(const std::filesystem::path& path, std::string_view text) const {
  std::filesystem::path temporary = path;
  temporary += "~" + std::to_string(rank_);
  std::ofstream(temporary, std::ios::binary) << text;
  std::filesystem::rename(temporary, path);
}

void FileControl::post(std::string_view key, std::span<const int> members,
                       std::string_view message) {
  write(file(key, members, rank_), message);
}

std::vector<std::string> FileControl::collect(std::string_view key, std::span<const int> members,
                                              comm::WaitState waiting) {
  std::vector<std::string> messages;
  for (const int member : members) {
    waiting.peer = member;
    const int slot = begin_wait(waiting);
    auto message = read(file(key, members, member));
    while (!message && !failed()) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      message = read(file(key, members, member));
    }
    end_wait(slot);
    if (!message) throw_if_failed();
    messages.push_back(std::move(*message));
  }
  return messages;
}

std::vector<comm::UniqueFd> FileControl::exchange_descriptors(std::string_view /*key*/,
                                                              std::span<const int> /*members*/,
                                                              int /*fd*/) {
  throw Error("file control: it passes no descriptors");
}

int FileControl::begin_wait(comm::WaitState state) {
  const std::lock_guard lock(mutex_);
  waits_[next_slot_] = {state, Clock::now()};
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
  std::map<int, std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    failed_ = true;
    callbacks.swap(callbacks_);
  }
  for (const auto& [_, wake] : callbacks) wake();
}

void FileControl::throw_if_failed() const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  comm::throw_failure(*failure_);
}

std::shared_ptr<void> FileControl::on_failure(std::function<void()> wake) {
  const std::lock_guard lock(mutex_);
  const int number = next_callback_++;
  callbacks_[number] = std::move(wake);
  return {nullptr, [this, number](void*) {
            const std::lock_guard inner(mutex_);
            callbacks_.erase(number);
          }};
}

void FileControl::watch() {
  while (!closing_) {
    std::this_thread::sleep_for(milliseconds(20));
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
              describe(wait.state) + ": timed out on rank " + std::to_string(rank_),
              {}};
    }
  }
  if (late) fail(*late);
}

}  // namespace hsdp::gpu
