// Codes: what bytes stand for a vector on the wire.
//
// A code writes one *section* per chunk: everything a chunk needs, nothing of another chunk. It works on pieces: the
// part of one block that lies in one tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "zeroone/types.h"

namespace zeroone {

/// What a code must know of a chunk's shape.
struct ChunkShape {
  std::int64_t elements = 0;  // L, padding included; a multiple of 8
  std::int64_t blocks = 0;    // the most blocks that any chunk has
};

/// Where a piece lies in its chunk.
struct PieceRef {
  ChunkShape chunk;
  std::int64_t begin = 0;  // first element, counted from the start of the chunk
  std::int64_t n = 0;      // elements, at most kTile
  std::int64_t block = 0;  // index of the block within the chunk
};

class Code {
 public:
  virtual ~Code() = default;
  virtual std::string describe() const = 0;

  /// Whether the exchange keeps what the code loses, and adds it to what it sends next.
  virtual bool error_feedback() const = 0;

  /// Whether decode(encode(x)) is x.
  virtual bool exact() const = 0;

  /// Bytes of one section.
  virtual std::int64_t section_bytes(const ChunkShape& chunk) const = 0;

  /// Writes the values of a piece. Returns the piece's part of the block's statistic; not finite: the values can't be
  /// encoded. The pieces of one tile come in order, those of different tiles concurrently.
  virtual float encode(const PieceRef& piece, const float* values, std::byte* section) const = 0;

  /// Writes the block's scale from the sum of its pieces' statistics and its number of born coordinates.
  virtual void seal(const PieceRef& block, double statistic, std::int64_t born, std::byte* section) const = 0;

  /// out = decoded values; 0 where support is given and not > 0.
  virtual void decode(const PieceRef& piece, const std::byte* section, const float* support, float* out) const = 0;

  /// sum += decoded values, the support ignored.
  virtual void accumulate(const PieceRef& piece, const std::byte* section, float* sum) const = 0;
};

using CodePtr = std::shared_ptr<const Code>;

/// fp32 as it is: 4 bytes per element.
CodePtr identity_code();

/// bf16 or fp16, rounded to nearest even, without error feedback: 2 bytes per element. A value that overflows can't be
/// encoded. The mean is taken in fp32. Throws InvalidArgument if `dtype` is fp32.
CodePtr half_code(DType dtype);

/// One sign bit per element and one fp32 scale per block: scales first, then bits, element i of the chunk in bit
/// i % 8 (least significant first) of byte i / 8; 1 means negative, and 0 and -0 count as positive.
CodePtr sign_code(Scale scale = Scale::kL1);

}  // namespace zeroone
