// An explicit list of steps.
#include <algorithm>
#include <string>
#include <utility>

#include "zeroone/error.h"
#include "zeroone/schedule.h"

namespace zeroone {
namespace {

class Steps final : public Schedule {
 public:
  explicit Steps(std::vector<std::int64_t> steps) : steps_(std::move(steps)) {
    std::int64_t last = 0;
    for (const std::int64_t step : steps_) {
      if (step <= last) {
        throw InvalidArgument("Invalid steps: " + std::to_string(step) + " after " + std::to_string(last) +
                              " (must be positive and increasing)");
      }
      last = step;
    }
  }

  std::string describe() const override {
    std::string text = "Steps([";
    for (std::size_t i = 0; i < steps_.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(steps_[i]);
    return text + "])";
  }

  // Not by state.next, which is 1 before the first event whatever the list says.
  bool reached(const ScheduleState& state, std::int64_t step) const override {
    const std::int64_t from = state.index == 0 ? first() : state.next;
    return step >= from;
  }

 protected:
  std::int64_t next_after(const ScheduleState&, std::int64_t step, std::span<const double>) const override {
    const auto next = std::upper_bound(steps_.begin(), steps_.end(), step);
    return next == steps_.end() ? kNever : *next;
  }

 private:
  std::int64_t first() const { return steps_.empty() ? kNever : steps_.front(); }

  std::vector<std::int64_t> steps_;
};

}  // namespace

SchedulePtr steps(std::vector<std::int64_t> steps) { return std::make_shared<Steps>(std::move(steps)); }

}  // namespace zeroone
