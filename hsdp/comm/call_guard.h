// What every engine keeps around its collectives: they are made by the process that made the
// engine, by one thread at a time, and one that breaks off ends the world.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <string_view>

#include "hsdp/comm/control.h"
#include "hsdp/comm/fork_guard.h"

namespace hsdp::comm {

class CallGuard {
 public:
  // The engine is in use while it lives.
  class Entry {
   public:
    explicit Entry(std::atomic<bool>& busy) : busy_(busy) {}
    ~Entry() { busy_.store(false); }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    std::atomic<bool>& busy_;
  };

  // UsageError in a forked child, and while another thread is inside.
  [[nodiscard]] Entry enter();
  [[nodiscard]] bool in_forked_child() const { return made_at_ != fork_generation(); }

 private:
  std::uint32_t made_at_ = fork_generation();
  std::atomic<bool> busy_{false};
};

// A call broke off with `error` while the peers are in the middle of it: they must not wait for
// this rank. Without effect when the world's end is what was thrown.
void end_world(Control& control, std::string_view engine, const std::exception& error);

}  // namespace hsdp::comm
