#include "bindings/module/held_object.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace hsdp::python {
namespace {

struct PutAside {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::vector<PyObject*> objects;
};

// Never destroyed: threads of the library may still release objects while the process exits.
PutAside& put_aside() {
  static auto* const instance = new PutAside;
  return *instance;
}

void let_go_later(const void* object) {
  PutAside& aside = put_aside();
  const std::scoped_lock lock(aside.mutex);
  aside.objects.push_back(static_cast<PyObject*>(const_cast<void*>(object)));  // NOLINT
  aside.any.store(true, std::memory_order_release);
}

}  // namespace

std::shared_ptr<const void> hold(pybind11::object object) {
  return {static_cast<const void*>(object.release().ptr()), let_go_later};
}

void release_held() {
  PutAside& aside = put_aside();
  if (!aside.any.load(std::memory_order_acquire)) return;
  std::vector<PyObject*> objects;
  {
    const std::scoped_lock lock(aside.mutex);
    objects.swap(aside.objects);
    aside.any.store(false, std::memory_order_relaxed);
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

}  // namespace hsdp::python
