// The named algorithms, one row each; docs/algorithms.md is made from this table.
#include "zeroone/recipe.h"

namespace zeroone {

std::span<const Algorithm> algorithms() {
  static constexpr Algorithm kAlgorithms[] = {
      {"ZeroOneAdam", "2202.06009", "v refreshed at doubling gaps, u averaged at gaps tied to the learning rate",
       "Adam, v held", "one sign bit, block scale, residual on both sides", "two-phase all-reduce"},
      {"OneBitAdam", "2102.02888", "dense until warmup_steps, then the momentum every step",
       "Adam, v frozen after warm-up", "one sign bit, block scale, residual on both sides", "two-phase all-reduce"},
      {"AdamW", "1711.05101", "the gradient every step", "Adam", "fp32, no residual", "two-phase all-reduce"},
  };
  return kAlgorithms;
}

}  // namespace zeroone
