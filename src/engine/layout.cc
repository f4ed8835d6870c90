#include "engine/layout.h"

#include <algorithm>

namespace zeroone {

SlabLayout::SlabLayout(std::span<const TensorSpec> tensors, int ranks) {
  for (const TensorSpec& tensor : tensors) numel += tensor.numel;
  const std::int64_t per_rank = std::int64_t{8} * ranks;
  chunk.elements = 8 * ((numel + per_rank - 1) / per_rank);

  std::size_t tensor = 0;
  std::int64_t tensor_first = 0;  // where `tensor` begins in the slab
  tile_piece.push_back(0);
  for (std::int64_t j = 0; j < ranks; ++j) {
    chunk_tile.push_back(tiles());
    chunk_block.push_back(static_cast<std::int64_t>(blocks.size()));
    const std::int64_t chunk_begin = std::min(numel, j * chunk.elements);
    const std::int64_t chunk_end = std::min(numel, chunk_begin + chunk.elements);
    for (std::int64_t begin = chunk_begin; begin < chunk_end;) {
      const std::int64_t tile_end = std::min(chunk_end, begin + kTile);
      while (begin < tile_end) {
        while (tensor_first + tensors[tensor].numel <= begin) tensor_first += tensors[tensor++].numel;
        const std::int64_t end = std::min(tile_end, tensor_first + tensors[tensor].numel);
        const auto piece = static_cast<std::int64_t>(pieces.size());
        if (begin == chunk_begin || begin == tensor_first) {
          blocks.push_back({j, static_cast<std::int64_t>(blocks.size()) - chunk_block.back(), piece, piece});
        }
        blocks.back().end_piece = piece + 1;
        pieces.push_back({begin, end - begin, static_cast<std::int64_t>(tensor), begin - tensor_first,
                          static_cast<std::int64_t>(blocks.size()) - 1});
        begin = end;
      }
      tile_piece.push_back(static_cast<std::int64_t>(pieces.size()));
    }
    chunk.blocks = std::max(chunk.blocks, static_cast<std::int64_t>(blocks.size()) - chunk_block.back());
  }
  chunk_tile.push_back(tiles());
  chunk_block.push_back(static_cast<std::int64_t>(blocks.size()));
}

}  // namespace zeroone
