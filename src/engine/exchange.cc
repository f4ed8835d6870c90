#include "engine/exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "kernels/kernels.h"
#include "zeroone/error.h"

namespace zeroone {
namespace {

// Calls body(index, piece) for the pieces of tiles [begin, end).
template <typename Body>
void for_pieces(const SlabLayout& layout, std::int64_t begin, std::int64_t end, Body body) {
  const std::int64_t first = layout.tile_piece[static_cast<std::size_t>(begin)];
  const std::int64_t last = layout.tile_piece[static_cast<std::size_t>(end)];
  for (std::int64_t i = first; i < last; ++i) body(i, layout.pieces[static_cast<std::size_t>(i)]);
}

bool is_frozen(const ExchangeSlab& slab, const Piece& piece) {
  return !slab.frozen.empty() && slab.frozen[static_cast<std::size_t>(piece.tensor)] != 0;
}

const float* support(const ExchangeSlab& slab, const Piece& piece) {
  return slab.support == nullptr ? nullptr : slab.support + piece.begin;
}

}  // namespace

Exchange::Exchange(const Code& code, std::vector<ExchangeSlab> slabs, int rank, int ranks)
    : code_(code), slabs_(std::move(slabs)), rank_(rank), ranks_(ranks) {
  headers_.resize(static_cast<std::size_t>(ranks));
  for (ExchangeSlab& slab : slabs_) {
    section_offset_.push_back(body_bytes_);
    body_bytes_ += static_cast<std::size_t>(code.section_bytes(slab.layout->chunk));
    slab.statistic.resize(slab.layout->pieces.size());
    if (code.error_feedback()) slab.server_mean.resize(static_cast<std::size_t>(slab.layout->chunk.elements));
  }
}

template <typename Body>
void Exchange::for_own_tiles(std::size_t slab, Body body) {
  const SlabLayout& layout = *slabs_[slab].layout;
  const std::int64_t chunk_begin = rank_ * layout.chunk.elements;
  const std::int64_t first_tile = layout.chunk_tile[static_cast<std::size_t>(rank_)];
  const std::int64_t end_tile = layout.chunk_tile[static_cast<std::size_t>(rank_) + 1];
  pool_->parallel_for(end_tile - first_tile, threads_, [&](std::int64_t begin, std::int64_t end) {
    for_pieces(layout, first_tile + begin, first_tile + end,
               [&](std::int64_t i, const Piece& piece) { body(i, piece, piece.begin - chunk_begin); });
  });
}

bool Exchange::seal(std::int64_t chunk, std::size_t slab, std::byte* section) const {
  const ExchangeSlab& s = slabs_[slab];
  const SlabLayout& layout = *s.layout;
  for (std::int64_t b = layout.chunk_block[static_cast<std::size_t>(chunk)];
       b < layout.chunk_block[static_cast<std::size_t>(chunk) + 1]; ++b) {
    const Block& block = layout.blocks[static_cast<std::size_t>(b)];
    double statistic = 0;
    for (std::int64_t i = block.first_piece; i < block.end_piece; ++i) {
      statistic += s.statistic[static_cast<std::size_t>(i)];
    }
    if (!std::isfinite(statistic)) return false;
    const Piece& first = layout.pieces[static_cast<std::size_t>(block.first_piece)];
    code_.seal(layout.ref(first), statistic, s.born[static_cast<std::size_t>(b)], section);
  }
  return true;
}

bool Exchange::encode(Wire& wire, ThreadPool& pool, int threads, Source source) {
  bool finite = true;
  for (std::size_t k = 0; k < slabs_.size(); ++k) {
    ExchangeSlab& slab = slabs_[k];
    if (!slab.active) continue;
    const SlabLayout& layout = *slab.layout;
    pool.parallel_for(layout.tiles(), threads, [&](std::int64_t begin, std::int64_t end) {
      alignas(64) float scratch[kTile];
      for_pieces(layout, begin, end, [&](std::int64_t i, const Piece& piece) {
        const float* values = scratch;
        if (is_frozen(slab, piece)) {
          std::fill_n(scratch, piece.n, 0.0f);
        } else {
          values = source(k, piece, scratch);
        }
        slab.statistic[static_cast<std::size_t>(i)] =
            code_.encode(layout.ref(piece), values, wire.send.data + in_bodies(layout.chunk_of(piece), k));
      });
    });
    for (std::int64_t j = 0; j < ranks_; ++j) finite = seal(j, k, wire.send.data + in_bodies(j, k)) && finite;
  }
  return finite;
}

void Exchange::set_header(Wire& wire, const Header& header) {
  header_ = header;
  for (std::int64_t j = 0; j < ranks_; ++j) {
    std::memcpy(wire.headers.data + static_cast<std::size_t>(j) * sizeof header, &header, sizeof header);
  }
}

bool Exchange::run(Communicator& communicator, const Collective& collective, Wire& wire, ThreadPool& pool, int threads,
                   Inspect inspect) {
  pool_ = &pool;
  threads_ = threads;
  inspect_ = &inspect;
  return collective.run(communicator, wire, *this);
}

bool Exchange::inspect(const std::byte* headers) {
  std::memcpy(headers_.data(), headers, headers_.size() * sizeof(Header));
  return (*inspect_)(headers_);
}

void Exchange::combine(const std::byte* bodies, std::byte* contribution) {
  const auto divisor = static_cast<float>(ranks_);
  const bool feedback = code_.error_feedback();
  Header header = header_;
  header.flags |= likeness(bodies);
  for (std::size_t k = 0; k < slabs_.size(); ++k) {
    ExchangeSlab& slab = slabs_[k];
    if (!slab.active) continue;
    std::byte* own = contribution + in_result(0, k);
    for_own_tiles(k, [&](std::int64_t i, const Piece& piece, std::int64_t in_chunk) {
      alignas(64) float scratch[kTile];
      const PieceRef ref = slab.layout->ref(piece);
      float* mean = feedback ? slab.server_mean.data() + in_chunk : scratch;
      code_.decode(ref, bodies + in_bodies(0, k), nullptr, mean);
      for (std::int64_t r = 1; r < ranks_; ++r) code_.accumulate(ref, bodies + in_bodies(r, k), mean);
      kernels().divide(piece.n, divisor, mean);
      if (feedback && is_frozen(slab, piece)) {
        std::fill_n(mean, piece.n, 0.0f);
      } else if (feedback) {
        kernels().add_residual(piece.n, mean, slab.rho, slab.server_error + in_chunk, support(slab, piece), mean);
      }
      slab.statistic[static_cast<std::size_t>(i)] = code_.encode(ref, mean, own);
    });
    // The other ranks wait for this contribution: they are told, and all throw in inspect_result.
    if (!seal(rank_, k, own)) header.flags |= kFailed;
  }
  std::memcpy(contribution, &header, sizeof header);
}

std::uint16_t Exchange::likeness(const std::byte* bodies) const {
  if (ranks_ == 1) return kUnlike;
  for (std::int64_t r = 1; r < ranks_; ++r) {
    if (std::memcmp(bodies, bodies + static_cast<std::size_t>(r) * body_bytes_, body_bytes_) != 0) return kUnlike;
  }
  return std::any_of(bodies, bodies + body_bytes_, [](std::byte b) { return b != std::byte{0}; }) ? kNonzero : 0;
}

void Exchange::inspect_result(const std::byte* result) {
  result_flags_ = 0;
  for (std::int64_t j = 0; j < ranks_; ++j) {
    Header header;
    std::memcpy(&header, result + static_cast<std::size_t>(j) * (sizeof header + body_bytes_), sizeof header);
    if (header.magic != header_.magic || header.kind != header_.kind || header.step != header_.step) {
      throw DisagreementError("rank " + std::to_string(j) + " answered a round of step " + std::to_string(header.step) +
                              ", this rank is at step " + std::to_string(header_.step));
    }
    if (header.flags & kFailed) {
      throw DisagreementError("rank " + std::to_string(j) + ": the mean over the ranks overflows fp32 at step " +
                              std::to_string(header.step));
    }
    result_flags_ |= header.flags;
  }
}

void Exchange::decode(const std::byte* section, std::size_t slab, const Piece& piece, float* out) const {
  const ExchangeSlab& s = slabs_[slab];
  code_.decode(s.layout->ref(piece), section, support(s, piece), out);
}

void Exchange::decode_own(const Wire& wire, std::size_t slab, const Piece& piece, float* out) const {
  decode(wire.send.data + in_bodies(slabs_[slab].layout->chunk_of(piece), slab), slab, piece, out);
}

void Exchange::decode_result(const Wire& wire, std::size_t slab, const Piece& piece, float* out) const {
  decode(wire.receive.data + in_result(slabs_[slab].layout->chunk_of(piece), slab), slab, piece, out);
}

Wire Exchange::allocate(Communicator& communicator, std::size_t body_bytes) {
  const auto ranks = static_cast<std::size_t>(communicator.size());
  Wire wire;
  wire.headers = communicator.allocate(2 * ranks * sizeof(Header));
  wire.send = communicator.allocate(std::max<std::size_t>(ranks * body_bytes, 1));
  wire.receive = communicator.allocate((ranks + 1) * (sizeof(Header) + body_bytes));
  return wire;
}

void Exchange::release(Communicator& communicator, const Wire& wire) {
  for (const Buffer& buffer : {wire.headers, wire.send, wire.receive}) communicator.release(buffer);
}

void Exchange::commit_server_error(const Wire& wire, ThreadPool& pool, int threads) {
  pool_ = &pool;
  threads_ = threads;
  for (std::size_t k = 0; k < slabs_.size(); ++k) {
    ExchangeSlab& slab = slabs_[k];
    if (!slab.active) continue;
    for_own_tiles(k, [&](std::int64_t, const Piece& piece, std::int64_t in_chunk) {
      if (is_frozen(slab, piece)) {  // it lives in units of u, as the worker's
        for (std::int64_t i = 0; i < piece.n; ++i) slab.server_error[in_chunk + i] *= slab.rho;
        return;
      }
      alignas(64) float decoded[kTile];
      decode_result(wire, k, piece, decoded);
      kernels().subtract(piece.n, slab.server_mean.data() + in_chunk, decoded, slab.server_error + in_chunk);
    });
  }
}

}  // namespace zeroone
