// Learning rates and other settings over the steps of a trial.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "trial.h"

namespace zeroone::test {

enum class Plan { kConstant, kZeros, kDrop, kRestarts, kDecay, kStillGroup };
inline constexpr int kPlans = 6;

inline double learning_rate(Plan plan, std::int64_t t) {
  switch (plan) {
    case Plan::kConstant:
    case Plan::kStillGroup:
      return 1e-3;
    case Plan::kZeros:
      return t <= 2 || mix(static_cast<std::uint64_t>(t)) % 3 == 0 ? 0.0 : 1e-3;
    case Plan::kDrop:
      return t % 16 >= 8 && t % 16 < 13 ? 1e-6 : 1e-3;  // / 1000 for five steps, and back
    case Plan::kRestarts:
      return 1e-3 * (0.5 + 0.5 * std::cos(static_cast<double>(t % 14) * 3.14159265 / 14));
    case Plan::kDecay:
      return 1e-2 * std::pow(0.93, static_cast<double>(t));
  }
  return 0;
}

/// Every group has settings of its own; in kStillGroup the last of several groups has a learning
/// rate of 0 throughout.
inline std::vector<GroupOptions> options(Plan plan, std::int64_t t, std::size_t groups) {
  std::vector<GroupOptions> result(groups);
  for (std::size_t g = 0; g < groups; ++g) {
    GroupOptions& o = result[g];
    o.lr = learning_rate(plan, t) * static_cast<double>(g + 1);
    if (plan == Plan::kStillGroup && groups > 1 && g + 1 == groups) o.lr = 0;
    o.beta1 = g == 1 ? 0.8 : 0.9;
    o.beta2 = g == 1 ? 0.99 : 0.999;
    o.eps = g == 2 ? 1e-6 : 1e-8;
    o.weight_decay = g % 2 == 0 ? 0.1 : 0.0;
    o.maximize = g == 1;
  }
  return result;
}

}  // namespace zeroone::test
