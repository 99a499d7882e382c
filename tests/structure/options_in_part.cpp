// Every struct that users fill in, with one member given: compiled with
// -Wmissing-field-initializers as an error, as what -Wextra says in a user's build.
#include "hsdp/compare.h"
#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "hsdp/row_reducer.h"
#include "hsdp/snapshot.h"
#include "hsdp/validate.h"
#include "quant/loco_options.h"
#include "zero/adamw.h"
#include "zero/parameter_gather.h"
#include "zero/unit_gather.h"

namespace hsdp {

void give_in_part() {
  static_cast<void>(ReducerOptions{.layout = Layout::kFlat});
  static_cast<void>(ParameterSpec{.dtype = Dtype::kF32});
  static_cast<void>(MicrobatchOptions{.last = true});
  static_cast<void>(WindowOptions{.last = true});
  static_cast<void>(MeshOptions{.replicate = 1});
  static_cast<void>(WorldOptions{.engine = "host"});
  static_cast<void>(NamedArray{.name = "w"});
  static_cast<void>(TensorView{.count = 0});
  static_cast<void>(StridedView{.dtype = Dtype::kF32});
  static_cast<void>(LayoutParameter{.group = 0});
  static_cast<void>(ReduceScatter{.accumulate = true});
  static_cast<void>(AllReduce{.divisor = 1.0F});
  static_cast<void>(RowGroup{.name = "g"});
  static_cast<void>(HopParameter{.name = "w"});
  static_cast<void>(HopState{.key = "k"});
  static_cast<void>(Message{.where = "here"});
  static_cast<void>(SnapshotInfo{.step = 0});
  static_cast<void>(SnapshotEntry{.offset = 0});
  static_cast<void>(SnapshotState{.key = "k"});
  static_cast<void>(CompareOptions{.bitwise = true});
  static_cast<void>(ValidateOptions{.thread_count = 1});
  static_cast<void>(quant::LocoOptions{.bits = 4});
  static_cast<void>(zero::AdamWOptions{.weight_decay = 0.1});
  static_cast<void>(zero::AdamWParameter{.name = "w"});
  static_cast<void>(zero::AdamWUpdate{.grad_factor = nullptr});
  static_cast<void>(zero::GatheredParameter{.name = "w"});
  static_cast<void>(zero::UnitParameter{.name = "w"});
  static_cast<void>(zero::ParameterUnit{.name = "u"});
}

}  // namespace hsdp
