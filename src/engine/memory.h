// Reading gradients and writing parameters of any type, tile by tile.
#pragma once

#include <cstdint>

#include "zeroone/types.h"

namespace zeroone {

/// Elements [begin, begin + n) of `data` in fp32: where they lie, or converted into `scratch`.
const float* read_floats(const void* data, DType dtype, std::int64_t begin, std::int64_t n, float* scratch);

/// The same of the tensor's gradient times `factor`; zeros if there is none.
const float* read_gradient(const Tensor& tensor, float factor, std::int64_t begin, std::int64_t n, float* scratch);

/// Sum of squares in fp64, in 16 lanes.
double sum_of_squares(std::int64_t n, const float* x);

/// Rounds `values` to `dtype` and stores them as elements [begin, begin + n) of `data`.
void write_floats(void* data, DType dtype, std::int64_t begin, std::int64_t n, const float* values);

}  // namespace zeroone
