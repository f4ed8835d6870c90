// The identity code: fp32 as it is.
#include <cstring>
#include <limits>

#include "kernels/kernels.h"
#include "zeroone/code.h"

namespace zeroone {
namespace {

class Identity final : public Code {
 public:
  std::string describe() const override { return "fp32"; }

  bool error_feedback() const override { return false; }
  bool exact() const override { return true; }

  std::int64_t section_bytes(const ChunkShape& chunk) const override { return chunk.elements * 4; }

  float encode(const PieceRef& piece, const float* values, std::byte* section) const override {
    if (!kernels().all_finite(piece.n, values)) return std::numeric_limits<float>::quiet_NaN();
    std::memcpy(section + 4 * piece.begin, values, static_cast<std::size_t>(4 * piece.n));
    return 0;
  }

  void seal(const PieceRef&, double, std::int64_t, std::byte*) const override {}

  void decode(const PieceRef& piece, const std::byte* section, const float*, float* out) const override {
    std::memcpy(out, section + 4 * piece.begin, static_cast<std::size_t>(4 * piece.n));
  }

  void accumulate(const PieceRef& piece, const std::byte* section, float* sum) const override {
    kernels().add(piece.n, reinterpret_cast<const float*>(section + 4 * piece.begin), sum);
  }
};

}  // namespace

CodePtr identity_code() {
  static const CodePtr code = std::make_shared<Identity>();
  return code;
}

}  // namespace zeroone
