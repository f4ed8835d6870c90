// 0/1 Adam: Lu, Li, Zhang, De Sa, He, 2202.06009.
#include "zeroone/recipe.h"

namespace zeroone {

Recipe zero_one_adam(SchedulePtr variance_schedule, SchedulePtr sync_schedule, Scale scale, bool bias_correction,
                     CodePtr dense) {
  return {.name = "ZeroOneAdam",
          .refresh = std::move(variance_schedule),
          .sync = std::move(sync_schedule),
          .preconditioner = held_adam_preconditioner(),
          .code = sign_code(scale),
          .refresh_code = std::move(dense),
          .collective = two_phase_collective(),
          .accumulate = Accumulate::kSteps,
          .bias_correction = bias_correction};
}

}  // namespace zeroone
