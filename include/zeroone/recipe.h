// Recipes: a named algorithm is one choice on each axis.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "zeroone/code.h"
#include "zeroone/collective.h"
#include "zeroone/preconditioner.h"
#include "zeroone/schedule.h"

namespace zeroone {

/// What is summed into u over an interval.
enum class Accumulate : std::uint8_t {
  kSteps,     // lr' m: several local steps of different learning rates add up (0/1 Adam)
  kMomentum,  // m itself: at most one local step per sync; the learning rate is applied after averaging (1-bit Adam)
};

struct Recipe {
  std::string name;
  SchedulePtr refresh;  // when the exact mean gradient refreshes the preconditioner
  SchedulePtr sync;     // when u is averaged through `code`
  PreconditionerPtr preconditioner;
  CodePtr code;
  CodePtr refresh_code;  // of the dense exchanges; without error feedback
  CollectivePtr collective;
  Accumulate accumulate = Accumulate::kSteps;
  bool bias_correction = true;
};

/// 0/1 Adam, 2202.06009: v refreshed at `variance_schedule`, one sign bit at `sync_schedule`.
Recipe zero_one_adam(SchedulePtr variance_schedule = doubling(16), SchedulePtr sync_schedule = learning_rate_tied(16),
                     Scale scale = Scale::kL1, bool bias_correction = true, CodePtr dense = identity_code());

/// 1-bit Adam, 2102.02888: dense Adam for `warmup_steps`, then v frozen and one bit every step.
Recipe one_bit_adam(std::int64_t warmup_steps, Scale scale = Scale::kL1, bool bias_correction = true,
                    CodePtr dense = identity_code());

/// Exact data-parallel AdamW, 1711.05101: a dense refresh every step.
Recipe adamw(bool bias_correction = true, CodePtr dense = identity_code());

/// One row of the documentation's table.
struct Algorithm {
  std::string_view name;
  std::string_view paper;
  std::string_view schedule;
  std::string_view preconditioner;
  std::string_view code;
  std::string_view collective;
};

/// All named algorithms.
std::span<const Algorithm> algorithms();

}  // namespace zeroone
