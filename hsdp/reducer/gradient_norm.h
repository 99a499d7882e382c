// The norm of the gradients of one or several Reducers of a mesh, and clipping by it. Collective
// over the mesh. results.h says what the forms that return an Event wait for.
#pragma once

#include <span>
#include <string_view>

#include "hsdp/reducer/results.h"

namespace hsdp::reducer {

[[nodiscard]] double grad_norm(Results& results);
Event grad_norm(Results& results, TensorView out);
// One norm over all of them.
[[nodiscard]] double clip_grad_norm(std::span<Results* const> all, double max_norm);
Event clip_grad_norm(std::span<Results* const> all, double max_norm, TensorView norm);
// Only writes the factor. `call`: the caller's name in messages.
Event clip_factor(std::span<Results* const> all, double max_norm, TensorView norm,
                  TensorView factor, std::string_view call);

}  // namespace hsdp::reducer
