// The text of an inclusive last step.
#pragma once

#include <string>

#include "zeroone/schedule.h"

namespace zeroone {

inline std::string describe_until(std::int64_t until) { return until == kNever ? "None" : std::to_string(until); }

}  // namespace zeroone
