// What a Python part puts into the ranks' status words; it must be equal on all ranks.
#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "bindings/module/bindings.h"
#include "bindings/module/reducer_handle.h"
#include "hsdp/step_party.h"

namespace hsdp::python {
namespace {

namespace py = pybind11;

// Python sets it in advance: the Reducer asks on its own thread, while Python may be waiting.
class StepWord final : public StepParty {
 public:
  explicit StepWord(std::string owner) : owner_(std::move(owner)) {}

  [[nodiscard]] std::string owner() const override { return owner_; }
  [[nodiscard]] std::string word() const override {
    const std::scoped_lock lock(mutex_);
    return word_;
  }
  [[nodiscard]] bool has_state() const override { return false; }
  [[nodiscard]] std::string details(const std::string& word) const override {
    const std::scoped_lock lock(mutex_);
    return word == word_ ? details_ : std::string();
  }
  void say(std::string word, std::string details) {
    const std::scoped_lock lock(mutex_);
    word_ = std::move(word);
    details_ = std::move(details);
  }

 private:
  const std::string owner_;
  mutable std::mutex mutex_;
  std::string word_;
  std::string details_;
};

std::shared_ptr<StepWord> make_step_word(ReducerHandle& reducer, std::string owner) {
  auto word = std::make_shared<StepWord>(std::move(owner));
  reducer.call([word](Reducer& its) { its.add_party(word); });
  return word;
}

}  // namespace

void bind_step_word(py::module_& module) {
  py::class_<StepWord, std::shared_ptr<StepWord>>(module, "StepWord")
      .def(py::init(&make_step_word))
      .def("say", &StepWord::say);
}

}  // namespace hsdp::python
