// 1-bit Adam: Tang et al., 2102.02888. Dense Adam first, then v frozen and the momentum averaged by one bit every step.
#include <string>

#include "zeroone/error.h"
#include "zeroone/recipe.h"

namespace zeroone {

Recipe one_bit_adam(std::int64_t warmup_steps, Scale scale, bool bias_correction,
                    CodePtr dense) {
  if (warmup_steps < 1) {
    throw InvalidArgument("Invalid warmup_steps: " + std::to_string(warmup_steps) +
                          " (v needs at least one dense step)");
  }
  return {.name = "OneBitAdam",
          .refresh = every_step(warmup_steps),
          .sync = every_step(),
          .preconditioner = held_adam_preconditioner(),
          .code = sign_code(scale),
          .refresh_code = std::move(dense),
          .collective = two_phase_collective(),
          .accumulate = Accumulate::kMomentum,
          .bias_correction = bias_correction};
}

}  // namespace zeroone
