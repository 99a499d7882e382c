// One NCCL communicator of this rank, made and split without blocking.
//
// Making it is collective. One thread at a time calls group() and split(); the watch calls look()
// and take(). After take() every call throws what ended the world.
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

// How long Control may take to notice a lost peer that NCCL saw first.
constexpr std::chrono::milliseconds kVerdictTime{3'000};
// The same for an error of this rank, since a peer may have made a different call.
constexpr std::chrono::milliseconds kOwnVerdictTime{500};

// The world's failure that follows from NCCL's error during `call`.
[[nodiscard]] Failure nccl_failure(const Control& control, bool remote, const std::string& text,
                                   WaitState call);

class NcclLink {
 public:
  // Waits until all `size` ranks have come with the same `id`.
  NcclLink(std::shared_ptr<NcclWorld> world, int size, int rank, const std::string& id);
  ~NcclLink();
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Collective over this link; returns nullptr for a negative color.
  [[nodiscard]] std::unique_ptr<NcclLink> split(int color, int key);
  // Makes the calls of `issue` one group; returns when NCCL has accepted them.
  void group(WaitState call, const std::function<void(NcclHandle)>& issue);

  [[nodiscard]] NcclStatus look();
  // Returns the handle once, for the thread that aborts it; afterwards nullptr.
  [[nodiscard]] NcclHandle take();
  // Registers memory with NCCL; nullptr if NCCL declines.
  [[nodiscard]] void* enroll(void* memory, std::size_t bytes);
  void withdraw(void* enrolled) noexcept;
  // Nonzero from before the abort on: results that the GPU then produces are garbage.
  [[nodiscard]] const std::atomic<std::uint32_t>& poison() const { return poison_; }
  // Call it before an abort.
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
