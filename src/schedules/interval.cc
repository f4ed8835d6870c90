// Fixed gaps: every step, or every `interval` steps.
#include <algorithm>
#include <bit>
#include <string>

#include "schedules/until.h"
#include "zeroone/error.h"
#include "zeroone/schedule.h"

namespace zeroone {
namespace {

class Interval final : public Schedule {
 public:
  explicit Interval(std::int64_t interval) : interval_(interval) {
    if (interval < 1) throw InvalidArgument("Invalid interval: " + std::to_string(interval) + " (must be at least 1)");
  }

  std::string describe() const override { return "Interval(" + std::to_string(interval_) + ")"; }

 protected:
  std::int64_t next_after(const ScheduleState&, std::int64_t step, std::span<const double>) const override {
    return step + interval_;
  }

 private:
  std::int64_t interval_;
};

class EveryStep final : public Schedule {
 public:
  explicit EveryStep(std::int64_t until) : until_(until) {
    if (until < 1) throw InvalidArgument("Invalid until: " + std::to_string(until) + " (must be at least 1)");
  }

  std::string describe() const override { return "EveryStep(until=" + describe_until(until_) + ")"; }

  std::int64_t until() const override { return until_; }

  bool reached(const ScheduleState& state, std::int64_t step) const override {
    return step <= until_ || step >= state.next;
  }

 protected:
  std::int64_t next_after(const ScheduleState&, std::int64_t step, std::span<const double>) const override {
    if (step < until_) return step + 1;
    return step + static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(std::max<std::int64_t>(step / 16, 1))));
  }

 private:
  std::int64_t until_;
};

}  // namespace

SchedulePtr interval(std::int64_t interval) { return std::make_shared<Interval>(interval); }

SchedulePtr every_step(std::int64_t until) { return std::make_shared<EveryStep>(until); }

}  // namespace zeroone
