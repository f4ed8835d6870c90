#include "zeroone/schedule.h"

#include <algorithm>

namespace zeroone {

void Schedule::advance(ScheduleState& state, std::int64_t step, std::span<const double> lr) const {
  state.next = next_after(state, step, lr);
  ++state.index;
  state.last_lr.assign(lr.begin(), lr.end());
}

void Schedule::observe(ScheduleState& state, std::span<const double> lr) {
  state.peak_lr.resize(lr.size(), 0.0);  // a group added later starts without a peak
  for (std::size_t g = 0; g < lr.size(); ++g) state.peak_lr[g] = std::max(state.peak_lr[g], lr[g]);
}

}  // namespace zeroone
