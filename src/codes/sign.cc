// One sign bit per element, one scale per block: 2202.06009, section 4.
#include <cmath>
#include <cstring>

#include "kernels/kernels.h"
#include "zeroone/code.h"

namespace zeroone {
namespace {

// Bits of one piece, starting at a byte; one byte more for the shifts.
struct Bits {
  std::uint8_t data[kTile / 8 + 1];
};

class Sign final : public Code {
 public:
  explicit Sign(Scale scale) : scale_(scale) {}

  std::string describe() const override { return scale_ == Scale::kL1 ? "sign, l1 scale" : "sign, l2 scale"; }

  bool error_feedback() const override { return true; }
  bool exact() const override { return false; }

  std::int64_t section_bytes(const ChunkShape& chunk) const override {
    return 4 * chunk.blocks + chunk.elements / 8;
  }

  float encode(const PieceRef& piece, const float* values, std::byte* section) const override {
    std::uint8_t* first = first_byte(piece, section);
    const int shift = static_cast<int>(piece.begin % 8);
    if (shift == 0) return kernels().sign_encode(piece.n, values, scale_, first);

    // The piece starts within a byte that the piece before, of the same tile, has begun.
    Bits own;
    const float statistic = kernels().sign_encode(piece.n, values, scale_, own.data);
    const std::int64_t source_bytes = (piece.n + 7) / 8;
    const std::int64_t target_bytes = (shift + piece.n + 7) / 8;
    first[0] = static_cast<std::uint8_t>(first[0] | (own.data[0] << shift));
    own.data[source_bytes] = 0;
    for (std::int64_t i = 1; i < target_bytes; ++i) {
      first[i] = static_cast<std::uint8_t>((own.data[i] << shift) | (own.data[i - 1] >> (8 - shift)));
    }
    return statistic;
  }

  void seal(const PieceRef& block, double statistic, std::int64_t born, std::byte* section) const override {
    double scale = born == 0 ? 0.0 : statistic / static_cast<double>(born);
    if (scale_ == Scale::kL2) scale = std::sqrt(scale);
    const auto rounded = static_cast<float>(scale);
    std::memcpy(section + 4 * block.block, &rounded, sizeof rounded);
  }

  void decode(const PieceRef& piece, const std::byte* section, const float* support, float* out) const override {
    Bits scratch;
    kernels().sign_decode(piece.n, aligned_bits(piece, section, scratch), scale_of(piece, section), support, out);
  }

  void accumulate(const PieceRef& piece, const std::byte* section, float* sum) const override {
    Bits scratch;
    kernels().sign_accumulate(piece.n, aligned_bits(piece, section, scratch), scale_of(piece, section), sum);
  }

 private:
  static float scale_of(const PieceRef& piece, const std::byte* section) {
    float scale;
    std::memcpy(&scale, section + 4 * piece.block, sizeof scale);
    return scale;
  }

  static std::uint8_t* first_byte(const PieceRef& piece, std::byte* section) {
    return reinterpret_cast<std::uint8_t*>(section + 4 * piece.chunk.blocks) + piece.begin / 8;
  }

  // The piece's bits from the start of a byte: where they lie, or moved to `scratch`.
  static const std::uint8_t* aligned_bits(const PieceRef& piece, const std::byte* section, Bits& scratch) {
    const std::uint8_t* first = first_byte(piece, const_cast<std::byte*>(section));
    const int shift = static_cast<int>(piece.begin % 8);
    if (shift == 0) return first;
    const std::int64_t source_bytes = (shift + piece.n + 7) / 8;
    const std::int64_t target_bytes = (piece.n + 7) / 8;
    for (std::int64_t i = 0; i < target_bytes; ++i) {
      const int next = i + 1 < source_bytes ? first[i + 1] : 0;
      scratch.data[i] = static_cast<std::uint8_t>((first[i] >> shift) | (next << (8 - shift)));
    }
    return scratch.data;
  }

  Scale scale_;
};

}  // namespace

CodePtr sign_code(Scale scale) { return std::make_shared<Sign>(scale); }

}  // namespace zeroone
