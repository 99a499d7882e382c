// What a GPU build provides behind the kernels. Called inside a task of a CUDA stream: everything
// is enqueued and nothing waits. In a build without CUDA, where no such stream can exist,
// no_device_kernels.cpp replaces it. Arguments are already checked. Internal to hsdp/kernels.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "hsdp/device/stream.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/clip.h"
#include "hsdp/kernels/device_pack_list.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/row_pass.h"
#include "hsdp/kernels/sum_rows.h"
#include "hsdp/tensor_view.h"

namespace hsdp::kernels {

// run(). Sets `nonfinite`, unless it is nullptr, if a result is not finite after rounding.
void run_on_device(const RowPass& pass, std::atomic<std::uint32_t>* nonfinite,
                   const Stream& stream);

// cast_and_pack() of at most kMostPackItems contiguous gradients; sets their first_unit.
void pack_list_on_device(const PackKind& kind, std::span<const PackItem> items,
                         const Stream& stream);

// cast_and_pack() of a non-contiguous gradient.
void pack_on_device(const CastAndPack& args, const Stream& stream);

// sum_rows() for i64.
void sum_integers_on_device(const SumRows& args, const Stream& stream);

void squared_norms_on_device(std::span<const SquaredNorm> norms, const Stream& stream);
void find_nonfinite_on_device(ConstTensorView values, std::atomic<std::uint32_t>* nonfinite,
                              const Stream& stream);
void add_digest_on_device(ConstTensorView values, std::uint64_t place, std::uint64_t* sum,
                          const Stream& stream);
void indicate_on_device(const void* word, float* out, const Stream& stream);
void poison_on_device(const std::atomic<std::uint32_t>& word, TensorView out,
                      std::atomic<std::uint32_t>* nonfinite, const Stream& stream);

void sum_in_order_on_device(const double* values, std::int64_t count, double* sum,
                            const Stream& stream);
void clip_factor_on_device(const ClipFactor& args, const Stream& stream);
void scale_by_on_device(TensorView values, const double* factor, const Stream& stream);

}  // namespace hsdp::kernels
