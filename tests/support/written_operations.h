// Operations with made-up times, for tests of what is read from the record.
#pragma once

#include "hsdp/comm/operation_record.h"
#include "hsdp/reducer_internal.h"

namespace hsdp::test {

// A rank whose clock has an offset and another rate.
struct RankClock {
  double start_s = Operations::now_s();  // when it is `ahead_s` ahead
  double ahead_s = 0;
  double drift = 0;
  double skipped_s = 0;  // time that passed without a wait

  [[nodiscard]] double at(double after_start_s) const {
    return start_s + ahead_s + (1 + drift) * after_start_s;
  }
  [[nodiscard]] double now_s() const { return at(Operations::now_s() - start_s + skipped_s); }
};

// Writes operations with made-up times, relative to the start.
class WrittenOperations {
 public:
  WrittenOperations(const Mesh& mesh, const RankClock& clock) : reducer_(mesh), clock_(clock) {}

  void write(const OperationPlace& place, double begin_s, double end_s) {
    const Operations& operations = ReducerInternal(reducer_).operations();
    operations.end(operations.begin(place, clock_.at(begin_s)), OperationState::kDone,
                   clock_.at(end_s));
  }
  void write_word(std::int64_t step, double begin_s, double end_s) {
    write({.kind = OperationKind::kWord, .step = step}, begin_s, end_s);
  }
  void skip(double seconds) { clock_.skipped_s += seconds; }
  [[nodiscard]] double now_s() const { return clock_.now_s(); }
  [[nodiscard]] Reducer& reducer() { return reducer_; }

 private:
  Reducer reducer_;
  RankClock clock_;
};

}  // namespace hsdp::test
