#include "engine/memory.h"

#include <cstring>

#include "kernels/kernels.h"

namespace zeroone {

const float* read_floats(const void* data, DType dtype, std::int64_t begin, std::int64_t n, float* scratch) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data) + begin;
    case DType::kBFloat16:
      kernels().bfloat16_to_float(n, static_cast<const std::uint16_t*>(data) + begin, scratch);
      return scratch;
    case DType::kFloat16:
      kernels().float16_to_float(n, static_cast<const std::uint16_t*>(data) + begin, scratch);
      return scratch;
  }
  return nullptr;
}

const float* read_gradient(const Tensor& tensor, float factor, std::int64_t begin, std::int64_t n, float* scratch) {
  if (tensor.gradient == nullptr) {
    std::memset(scratch, 0, static_cast<std::size_t>(n) * sizeof(float));
    return scratch;
  }
  const float* gradient = read_floats(tensor.gradient, tensor.gradient_dtype, begin, n, scratch);
  if (factor == 1) return gradient;
  for (std::int64_t i = 0; i < n; ++i) scratch[i] = factor * gradient[i];
  return scratch;
}

double sum_of_squares(std::int64_t n, const float* x) {
  constexpr std::int64_t kLanes = 16;
  double lane[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) lane[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  }
  for (std::int64_t j = 0; i + j < n; ++j) lane[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

void write_floats(void* data, DType dtype, std::int64_t begin, std::int64_t n, const float* values) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(static_cast<float*>(data) + begin, values, static_cast<std::size_t>(n) * sizeof(float));
      return;
    case DType::kBFloat16:
      kernels().float_to_bfloat16(n, values, static_cast<std::uint16_t*>(data) + begin);
      return;
    case DType::kFloat16:
      kernels().float_to_float16(n, values, static_cast<std::uint16_t*>(data) + begin);
      return;
  }
}

}  // namespace zeroone
