#include "zeroone/one_bit_all_reduce.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/exchange.h"
#include "kernels/kernels.h"
#include "zeroone/error.h"
#include "zeroone/state_memory.h"

namespace zeroone {
namespace {

std::array<TensorSpec, 1> checked_spec(std::int64_t numel) {
  if (numel < 1) throw InvalidArgument("Invalid numel: " + std::to_string(numel));
  return {TensorSpec{"values", numel}};
}

}  // namespace

class OneBitAllReduce::Impl {
 public:
  Impl(Communicator& communicator, std::int64_t numel, Scale scale, Allocator allocator)
      : code_(sign_code(scale)),
        rank_(communicator.rank()),
        layout_(checked_spec(numel), communicator.size()) {
    agree(communicator, {{"numel", std::to_string(numel)}, {"code", code_->describe()}});
    if (!allocator) {
      allocator = [this](std::string_view, std::int64_t, std::int64_t n) { return memory_.allocate(n); };
    }
    worker_error_ = allocator("worker_error", 0, numel);
    server_error_ = allocator("server_error", 0, chunk_numel());
    for (const Block& block : layout_.blocks) {
      born_.push_back(0);
      for (std::int64_t i = block.first_piece; i < block.end_piece; ++i) {
        born_.back() += layout_.pieces[static_cast<std::size_t>(i)].n;
      }
    }
    ExchangeSlab slab;
    slab.layout = &layout_;
    slab.server_error = server_error_;
    slab.born = born_;
    exchange_.emplace(*code_, std::vector<ExchangeSlab>{slab}, rank_, communicator.size());
    wire_ = Exchange::allocate(communicator, exchange_->body_bytes());
  }

  void reduce(Communicator& communicator, float* values, int threads) {
    const auto with_residual = [&](const Piece& piece, bool zero, float* out) {
      if (zero) std::fill_n(out, piece.n, 0.0f);
      kernels().add_residual(piece.n, zero ? out : values + piece.begin, 1.0f, worker_error_ + piece.begin, nullptr, out);
    };
    const auto encode = [&](bool zero) {
      return exchange_->encode(wire_, pool_, threads, [&](std::size_t, const Piece& piece, float* out) {
        with_residual(piece, zero, out);
        return static_cast<const float*>(out);
      });
    };
    const bool finite = encode(false);
    if (!finite) encode(true);
    Header header;
    header.kind = 1;
    header.flags = finite ? 0 : kNotFinite;
    header.step = round_ + 1;
    exchange_->set_header(wire_, header);
    const auto inspect = [&](std::span<const Header> headers) {
      for (std::size_t r = 0; r < headers.size(); ++r) {
        if (headers[r].magic == header.magic && headers[r].step == header.step) continue;
        throw DisagreementError("rank " + std::to_string(r) + " is in round " + std::to_string(headers[r].step) +
                                ", rank " + std::to_string(rank_) + " in round " + std::to_string(header.step));
      }
      return std::any_of(headers.begin(), headers.end(), [](const Header& h) { return (h.flags & kNotFinite) == 0; });
    };
    if (!exchange_->run(communicator, *two_phase_collective(), wire_, pool_, threads, inspect)) {
      throw InvalidArgument("no rank has finite values");
    }
    pool_.parallel_for(static_cast<std::int64_t>(layout_.pieces.size()), threads,
                       [&](std::int64_t begin, std::int64_t end) {
                         alignas(64) float b[kTile];
                         alignas(64) float decoded[kTile];
                         for (auto i = begin; i < end; ++i) {
                           const Piece& piece = layout_.pieces[static_cast<std::size_t>(i)];
                           with_residual(piece, !finite, b);
                           exchange_->decode_own(wire_, 0, piece, decoded);
                           kernels().subtract(piece.n, b, decoded, worker_error_ + piece.begin);
                           exchange_->decode_result(wire_, 0, piece, values + piece.begin);
                         }
                       });
    exchange_->commit_server_error(wire_, pool_, threads);
    ++round_;
  }

  float* worker_error() const { return worker_error_; }
  float* server_error() const { return server_error_; }
  std::int64_t chunk_begin() const { return std::min(layout_.numel, rank_ * layout_.chunk.elements); }
  std::int64_t chunk_numel() const { return std::min(layout_.numel - chunk_begin(), layout_.chunk.elements); }
  std::int64_t bytes_sent() const { return wire_.bytes_sent; }

 private:
  CodePtr code_;
  int rank_;
  SlabLayout layout_;
  std::vector<std::int64_t> born_;
  StateMemory memory_;  // unless the caller has an allocator
  float* worker_error_ = nullptr;
  float* server_error_ = nullptr;
  std::optional<Exchange> exchange_;
  Wire wire_;
  ThreadPool pool_;
  std::int64_t round_ = 0;
};

OneBitAllReduce::OneBitAllReduce(Communicator& communicator, std::int64_t numel, Scale scale, Allocator allocator)
    : impl_(std::make_unique<Impl>(communicator, numel, scale, std::move(allocator))) {}
OneBitAllReduce::~OneBitAllReduce() = default;
void OneBitAllReduce::reduce(Communicator& communicator, float* values, int threads) {
  impl_->reduce(communicator, values, threads);
}
float* OneBitAllReduce::worker_error() const { return impl_->worker_error(); }
float* OneBitAllReduce::server_error() const { return impl_->server_error(); }
std::int64_t OneBitAllReduce::chunk_begin() const { return impl_->chunk_begin(); }
std::int64_t OneBitAllReduce::chunk_numel() const { return impl_->chunk_numel(); }
std::int64_t OneBitAllReduce::bytes_sent() const { return impl_->bytes_sent(); }

}  // namespace zeroone
