// Guards every engine's collectives: only the process that made the engine may call them, one
// thread at a time, and a collective that fails half way ends the world.
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

  // Throws UsageError in a forked child, and while another thread is inside.
  [[nodiscard]] Entry enter();
  [[nodiscard]] bool in_forked_child() const { return made_at_ != fork_generation(); }

 private:
  std::uint32_t made_at_ = fork_generation();
  std::atomic<bool> busy_{false};
};

// A call failed with `error` while peers are in the middle of it: ends the world, so that they do
// not wait for this rank. No effect if the error is the world's end.
void end_world(Control& control, std::string_view engine, const std::exception& error);

}  // namespace hsdp::comm
