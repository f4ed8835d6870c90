// 16-bit floats, for the dense exchanges: half the bytes, no residual.
#include <limits>

#include "kernels/kernels.h"
#include "zeroone/code.h"
#include "zeroone/error.h"
#include "zeroone/preconditioner.h"

namespace zeroone {
namespace {

class Half final : public Code {
 public:
  explicit Half(DType dtype) : bfloat_(dtype == DType::kBFloat16) {
    if (dtype == DType::kFloat32) throw InvalidArgument("a half code has 16 bits: bf16 or fp16");
  }

  std::string describe() const override { return bfloat_ ? "bf16" : "fp16"; }
  bool error_feedback() const override { return false; }
  bool exact() const override { return false; }
  std::int64_t section_bytes(const ChunkShape& chunk) const override { return chunk.elements * 2; }

  float encode(const PieceRef& piece, const float* values, std::byte* section) const override {
    auto* halves = reinterpret_cast<std::uint16_t*>(section) + piece.begin;
    (bfloat_ ? kernels().float_to_bfloat16 : kernels().float_to_float16)(piece.n, values, halves);
    float rounded[kTile];
    read(piece, section, rounded);
    return kernels().all_finite(piece.n, rounded) ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }

  void seal(const PieceRef&, double, std::int64_t, std::byte*) const override {}

  void decode(const PieceRef& piece, const std::byte* section, const float*, float* out) const override {
    read(piece, section, out);
  }

  void accumulate(const PieceRef& piece, const std::byte* section, float* sum) const override {
    float values[kTile];
    read(piece, section, values);
    kernels().add(piece.n, values, sum);
  }

 private:
  void read(const PieceRef& piece, const std::byte* section, float* out) const {
    const auto* halves = reinterpret_cast<const std::uint16_t*>(section) + piece.begin;
    (bfloat_ ? kernels().bfloat16_to_float : kernels().float16_to_float)(piece.n, halves, out);
  }

  bool bfloat_;
};

}  // namespace

CodePtr half_code(DType dtype) { return std::make_shared<Half>(dtype); }

}  // namespace zeroone
