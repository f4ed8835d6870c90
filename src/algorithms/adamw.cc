// AdamW: Loshchilov, Hutter, 1711.05101; data-parallel with the exact mean gradient. The baseline.
#include "zeroone/recipe.h"

namespace zeroone {

Recipe adamw(bool bias_correction, CodePtr dense) {
  return {.name = "AdamW",
          .refresh = every_step(),
          .sync = every_step(),
          .preconditioner = adam_preconditioner(),
          .code = identity_code(),
          .refresh_code = std::move(dense),
          .collective = two_phase_collective(),
          .accumulate = Accumulate::kSteps,
          .bias_correction = bias_correction};
}

}  // namespace zeroone
