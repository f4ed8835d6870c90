// Plain data that several headers share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace zeroone {

/// Types that parameters and gradients may have. State is always fp32.
enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Name and element count of one tensor; what ranks must agree on before they exchange anything.
struct TensorSpec {
  std::string name;
  std::int64_t numel = 0;
};

/// One parameter's memory, owned by the caller, contiguous, collected anew at every call.
/// A null `gradient` counts as zero. A `frozen` tensor stays as it is. What is frozen changes with a round: at a step that has
/// one if no local step was pending before it, else after it. All ranks freeze the same.
struct Tensor {
  void* data = nullptr;
  const void* gradient = nullptr;
  DType dtype = DType::kFloat32;
  DType gradient_dtype = DType::kFloat32;
  float gradient_factor = 1;  // what the gradient is multiplied by, in fp32, when it is read (1 / loss scale)
  bool frozen = false;
};

/// Settings of one parameter group in one step. Checked by `validate`.
struct GroupOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  bool maximize = false;

  friend bool operator==(const GroupOptions&, const GroupOptions&) = default;
};

/// Throws InvalidArgument naming the setting and its value.
void validate(const GroupOptions& options);

/// How a block's scale follows from its values: mean of |b|, or root mean square.
enum class Scale : std::uint8_t { kL1, kL2 };

}  // namespace zeroone
