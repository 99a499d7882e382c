// The library's memory in Python: NumPy arrays and DLPack exports without a copy.
//
// A Memory and everything exported from it share the owner, so the memory outlives the Reducer or
// Mesh it came from [Note: views that outlive their Reducer]. On a GPU its content is valid after
// `ready`.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::python {

class Memory {
 public:
  Memory(TensorView view, Shape shape, std::shared_ptr<const void> owner, Event ready = {});
  // `count` private elements: zeros on the host; on a GPU with undefined content, valid on
  // `stream`, and freed in its order.
  [[nodiscard]] static Memory create(std::int64_t count, Dtype dtype, const Stream& stream);
  [[nodiscard]] static Memory zeros(std::int64_t count, Dtype dtype);
  void set_ready(Event ready) { ready_ = std::move(ready); }
  // For what a world's collectives write there: number() throws if the world has failed.
  void set_ready(Event ready, const Communicator& world) {
    ready_ = std::move(ready);
    world_ = world.engine();
  }
  [[nodiscard]] const Event& ready() const { return ready_; }

  [[nodiscard]] const TensorView& view() const { return view_; }
  [[nodiscard]] const Shape& shape() const { return shape_; }

  [[nodiscard]] pybind11::object numpy() const;
  // Its only element, an f64; waits for it.
  [[nodiscard]] double number() const;
  // Makes `stream`, in DLPack's numbering, wait for the content; -1: no wait is needed.
  [[nodiscard]] pybind11::capsule dlpack(bool versioned, std::optional<std::int64_t> stream) const;
  [[nodiscard]] pybind11::tuple dlpack_device() const;

 private:
  TensorView view_;
  Shape shape_;
  std::shared_ptr<const void> owner_;
  Event ready_;
  std::weak_ptr<Communicator::Engine> world_;
};

void bind_memory(pybind11::module_& module);

}  // namespace hsdp::python
