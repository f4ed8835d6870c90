// Gaps that grow as the learning rate falls: 2202.06009, section 5, without a second setting.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "zeroone/error.h"
#include "zeroone/schedule.h"

namespace zeroone {
namespace {

class LearningRateTied final : public Schedule {
 public:
  explicit LearningRateTied(std::int64_t max_interval) : max_interval_(max_interval) {
    if (max_interval < 1) {
      throw InvalidArgument("Invalid max_interval: " + std::to_string(max_interval) + " (must be at least 1)");
    }
  }

  std::string describe() const override { return "LearningRateTied(" + std::to_string(max_interval_) + ")"; }

 protected:
  std::int64_t next_after(const ScheduleState& state, std::int64_t step, std::span<const double> lr) const override {
    // The group that moves most, measured by its own peak, decides.
    double fall = std::numeric_limits<double>::infinity();  // its peak / lr
    bool any_peak = false;
    for (std::size_t g = 0; g < lr.size(); ++g) {
      if (g < state.last_lr.size() && lr[g] > state.last_lr[g]) return step + 1;
      if (state.peak_lr[g] > 0) {
        any_peak = true;
        fall = std::min(fall, state.peak_lr[g] / lr[g]);
      }
    }
    if (!any_peak) return step + 1;
    constexpr double kMaxFall = 0x1p40;  // also catches lr = 0
    const std::int64_t doublings = std::ilogb(std::min(fall, kMaxFall));
    return step + std::min(max_interval_, std::int64_t{1} << doublings);
  }

 private:
  std::int64_t max_interval_;
};

}  // namespace

SchedulePtr learning_rate_tied(std::int64_t max_interval) { return std::make_shared<LearningRateTied>(max_interval); }

}  // namespace zeroone
