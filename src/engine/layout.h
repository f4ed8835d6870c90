// How a slab is cut: tensors, chunks, blocks, tiles, pieces.
//
//   slab    the tensors of one parameter group, one behind the other
//   chunk   the part that one rank averages: L = 8 ceil(n / 8W) elements
//   block   the part of one tensor in one chunk: it has one scale
//   tile    2048 elements from the start of the chunk on: fits the first-level cache, unit of work of a thread
//   piece   the part of one block in one tile
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "zeroone/code.h"
#include "zeroone/preconditioner.h"
#include "zeroone/types.h"

namespace zeroone {

struct Piece {
  std::int64_t begin = 0;         // in the slab
  std::int64_t n = 0;
  std::int64_t tensor = 0;        // in the slab
  std::int64_t tensor_begin = 0;  // in the tensor
  std::int64_t block = 0;         // in the slab
};

struct Block {
  std::int64_t chunk = 0;
  std::int64_t index = 0;  // in the chunk
  std::int64_t first_piece = 0;
  std::int64_t end_piece = 0;
};

struct SlabLayout {
  SlabLayout(std::span<const TensorSpec> tensors, int ranks);

  std::int64_t numel = 0;
  ChunkShape chunk;                      // of every chunk
  std::vector<std::int64_t> tile_piece;  // tile i has pieces [tile_piece[i], tile_piece[i + 1])
  std::vector<std::int64_t> chunk_tile;  // chunk j has tiles [chunk_tile[j], chunk_tile[j + 1])
  std::vector<std::int64_t> chunk_block;  // chunk j has blocks [chunk_block[j], chunk_block[j + 1])
  std::vector<Piece> pieces;
  std::vector<Block> blocks;

  std::int64_t tiles() const { return static_cast<std::int64_t>(tile_piece.size()) - 1; }
  std::int64_t chunk_of(const Piece& piece) const { return blocks[static_cast<std::size_t>(piece.block)].chunk; }
  PieceRef ref(const Piece& piece) const {
    const Block& block = blocks[static_cast<std::size_t>(piece.block)];
    return {chunk, piece.begin - block.chunk * chunk.elements, piece.n, block.index};
  }
};

}  // namespace zeroone
