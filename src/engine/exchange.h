// One exchange of slabs among the ranks: encode, the server's mean, decode, residuals. The engine and the bare
// collective share it.
//
// Until `commit_server_error`, an exchange has written nothing but wire memory and server_mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/function_ref.h"
#include "engine/layout.h"
#include "engine/thread_pool.h"
#include "zeroone/code.h"
#include "zeroone/collective.h"

namespace zeroone {

/// Goes ahead of a body, or in front of it. docs/arithmetic.md, section Message.
struct Header {
  std::uint32_t magic = 0x306f657a;
  std::uint16_t kind = 0;
  std::uint16_t flags = 0;
  std::int64_t step = 0;
  double lr = 0;
  std::uint64_t settings = 0;
  std::uint64_t adopted = 0;
};
static_assert(sizeof(Header) == 40);

inline constexpr std::uint16_t kNotFinite = 1;
inline constexpr std::uint16_t kFailed = 2;
inline constexpr std::uint16_t kKeepsGradients = 4;  // of coordinates without support: Preconditioner::has_births
// Of a contribution: what the ranks sent differs; is not all zero.
inline constexpr std::uint16_t kUnlike = 8;
inline constexpr std::uint16_t kNonzero = 16;

/// What an exchange needs of one slab. Pointers are null where there is none.
struct ExchangeSlab {
  const SlabLayout* layout = nullptr;
  const float* support = nullptr;               // [numel]: > 0 where a coordinate takes part; null: all do
  float* server_error = nullptr;                // [L]: what this rank's chunk lost so far
  std::span<const std::int64_t> born;           // per block: coordinates that take part
  std::span<const char> frozen;                 // per tensor: sent as zero, and its residuals stay; empty: none is
  std::vector<float> server_mean;               // [L]: what this rank's contribution was encoded from
  std::vector<float> statistic;                 // per piece
  float rho = 1;
  bool active = true;  // takes part in this round; equal on all ranks
};

class Exchange final : public Payload {
 public:
  /// Fills the values of `piece` of slab `slab`, in `scratch` (kTile floats) or elsewhere.
  using Source = FunctionRef<const float*(std::size_t slab, const Piece& piece, float* scratch)>;
  /// Decides over the headers of all ranks, in rank order; see Payload::inspect.
  using Inspect = FunctionRef<bool(std::span<const Header> headers)>;

  Exchange(const Code& code, std::vector<ExchangeSlab> slabs, int rank, int ranks);

  std::vector<ExchangeSlab>& slabs() { return slabs_; }
  std::size_t header_bytes() const override { return sizeof(Header); }
  std::size_t body_bytes() const override { return body_bytes_; }

  /// What this exchange needs at least.
  static Wire allocate(Communicator& communicator, std::size_t body_bytes);
  static void release(Communicator& communicator, const Wire& wire);

  /// Writes this rank's bodies to `wire`; false: some value was not finite.
  bool encode(Wire& wire, ThreadPool& pool, int threads, Source source);
  void set_header(Wire& wire, const Header& header);

  /// Sends them. False: `inspect` said that there is nothing to combine. On an exception nothing has changed.
  bool run(Communicator& communicator, const Collective& collective, Wire& wire, ThreadPool& pool, int threads,
           Inspect inspect);

  /// What this rank sent, and what all received, for one piece. After `run`, until the next `encode`.
  void decode_own(const Wire& wire, std::size_t slab, const Piece& piece, float* out) const;
  void decode_result(const Wire& wire, std::size_t slab, const Piece& piece, float* out) const;

  /// Writes the new server_error of active slabs.
  void commit_server_error(const Wire& wire, ThreadPool& pool, int threads);

  /// Whether in the last round all ranks sent the same, and not zeros.
  bool alike() const { return (result_flags_ & kUnlike) == 0 && (result_flags_ & kNonzero) != 0; }

 private:
  bool inspect(const std::byte* headers) override;
  std::uint16_t likeness(const std::byte* bodies) const;
  void combine(const std::byte* bodies, std::byte* contribution) override;
  void inspect_result(const std::byte* result) override;

  /// Where the section of `slab` begins in the body for, or from, rank `chunk`.
  std::size_t in_bodies(std::int64_t chunk, std::size_t slab) const {
    return static_cast<std::size_t>(chunk) * body_bytes_ + section_offset_[slab];
  }
  /// The same in a result, where a header stands before every body.
  std::size_t in_result(std::int64_t chunk, std::size_t slab) const {
    return static_cast<std::size_t>(chunk) * (sizeof(Header) + body_bytes_) + sizeof(Header) + section_offset_[slab];
  }
  void decode(const std::byte* section, std::size_t slab, const Piece& piece, float* out) const;
  /// Calls body(piece index, piece, its start in the chunk) for the pieces of this rank's chunk, on all threads.
  template <typename Body>
  void for_own_tiles(std::size_t slab, Body body);
  /// Adds the statistics of the pieces of `chunk`'s blocks and writes the scales. False: not finite.
  bool seal(std::int64_t chunk, std::size_t slab, std::byte* section) const;

  const Code& code_;
  std::vector<ExchangeSlab> slabs_;
  std::vector<std::size_t> section_offset_;
  std::vector<Header> headers_;
  Header header_;
  std::size_t body_bytes_ = 0;
  std::uint16_t result_flags_ = 0;  // of all contributions
  std::int64_t rank_;
  std::int64_t ranks_;
  // Of the round that runs.
  ThreadPool* pool_ = nullptr;
  int threads_ = 1;
  const Inspect* inspect_ = nullptr;
};

}  // namespace zeroone
