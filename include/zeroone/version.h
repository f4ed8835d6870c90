#pragma once

namespace zeroone {

inline constexpr const char* kVersion = "0.1.0";

}  // namespace zeroone
