// Which instruction set the kernels use. All give the same bytes.
#pragma once

#include <string_view>
#include <vector>

namespace zeroone {

/// Sets that were compiled in and that this processor has, best first; the last is "scalar".
std::vector<std::string_view> available_instruction_sets();

/// The set in use: the best one, or what the environment variable ZEROONE_INSTRUCTION_SET named when the first kernel
/// ran (an unknown or unavailable name throws InvalidArgument there).
std::string_view instruction_set();

/// Floats per vector register in the compiled kernels of the set in use; 1 for "scalar".
int instruction_set_lanes();

/// Uses `name` from now on; throws InvalidArgument if it is not available. Not while another thread computes.
void select_instruction_set(std::string_view name);

}  // namespace zeroone
