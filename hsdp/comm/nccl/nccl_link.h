// One NCCL communicator of this rank, made and split without blocking.
//
// Collective to make. One thread at a time calls group() and split(); look() and take() come
// from the watch. After take() every call throws what ended the world.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "hsdp/comm/control.h"
#include "hsdp/comm/nccl/nccl_library.h"
#include "hsdp/comm/nccl/nccl_watch.h"
#include "hsdp/tensor_view.h"

namespace hsdp::comm {

// What all communicators of one rank share.
struct NcclWorld {
  std::shared_ptr<Control> control;
  std::shared_ptr<const NcclLibrary> library;
  Device device;
  std::unique_ptr<NcclWatch> watch;
};

// How long Control may take to notice a peer that is gone, which NCCL saw first.
constexpr std::chrono::milliseconds kVerdictTime{3'000};
// The same where it is this rank's own, and a peer may have made another call.
constexpr std::chrono::milliseconds kOwnVerdictTime{500};

// What an error of NCCL during `call` means to the world.
[[nodiscard]] Failure nccl_failure(const Control& control, bool remote, const std::string& text,
                                   WaitState call);

class NcclLink {
 public:
  // Waits until all `size` ranks came with the same `id`.
  NcclLink(std::shared_ptr<NcclWorld> world, int size, int rank, const std::string& id);
  ~NcclLink();
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Collective over this link; a negative color gets nullptr.
  [[nodiscard]] std::unique_ptr<NcclLink> split(int color, int key);
  // The calls that `issue` makes are one group; returns when NCCL has taken them.
  void group(WaitState call, const std::function<void(NcclHandle)>& issue);

  [[nodiscard]] NcclStatus look();
  // The handle, once, for whoever aborts it; nullptr when it was taken.
  [[nodiscard]] NcclHandle take();
  // Tells NCCL about memory; nullptr when it does not want to know.
  [[nodiscard]] void* enroll(void* memory, std::size_t bytes);
  void withdraw(void* enrolled) noexcept;
  // Not 0 from before its abort: what the GPU then takes for a result is garbage.
  [[nodiscard]] const std::atomic<std::uint32_t>& poison() const { return poison_; }
  // Says so; before an abort.
  void set_poison() { poison_ = 1; }

 private:
  NcclLink(std::shared_ptr<NcclWorld> world, NcclHandle handle);
  [[nodiscard]] NcclHandle require_handle() const;
  void settle(WaitState call);

  std::shared_ptr<NcclWorld> world_;
  std::mutex mutex_;  // NCCL takes one call at a time
  std::atomic<NcclHandle> handle_ = nullptr;
  std::atomic<std::uint32_t>& poison_;
};

}  // namespace hsdp::comm
