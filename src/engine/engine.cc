// Layout and attachment of an engine. The step loop is in step.cc. See engine.h for the contract.
#include "zeroone/engine.h"

#include <cstring>
#include <numeric>
#include <string>

#include "engine/impl.h"
#include "engine/memory.h"
#include "kernels/kernels.h"
#include "zeroone/version.h"

namespace zeroone {

double Stats::bits_per_parameter_step() const {
  return dense_bytes == 0 ? 0.0 : 32.0 * static_cast<double>(bytes_sent) / static_cast<double>(dense_bytes);
}

void Engine::Impl::add_group(std::vector<TensorSpec> tensors) {
  Slab slab;
  slab.first_tensor = tensors_;
  for (const TensorSpec& tensor : tensors) {
    if (tensor.numel < 0) {
      throw InvalidArgument("tensor '" + tensor.name + "' has " + std::to_string(tensor.numel) + " elements");
    }
    slab.tensor_begin.push_back(slab.numel);
    slab.numel += tensor.numel;
    for (std::int64_t begin = 0; begin < tensor.numel; begin += kTile) {
      slab.runs.push_back({slab.tensor_begin.size() - 1, begin, std::min(kTile, tensor.numel - begin)});
    }
  }
  slab.frozen.resize(tensors.size());
  slab.wanted.resize(tensors.size());
  slab.tensors = std::move(tensors);

  const auto group = static_cast<std::int64_t>(slabs_.size());
  const auto allocate = [&](std::string_view name) { return allocator_(name, group, slab.numel); };
  slab.anchor = allocate("anchor");
  slab.momentum = allocate("exp_avg");
  slab.accumulated = allocate("accumulated");
  const auto names = recipe_.preconditioner->vectors();
  for (std::size_t i = 0; i < names.size(); ++i) slab.own[i] = allocate(names[i]);
  if (recipe_.code->error_feedback()) slab.worker_error = allocate("worker_error");

  tensors_ += slab.tensors.size();
  slabs_.push_back(std::move(slab));
  counters_.slabs.emplace_back();
  stats_.parameters = total_numel();
  attached_to_ = nullptr;
}

Fingerprint Engine::Impl::layout_fingerprint() const {
  Fingerprint fingerprint = {
      {"zeroone version", kVersion},
      {"algorithm", recipe_.name},
      {"variance schedule", recipe_.refresh->describe()},
      {"sync schedule", recipe_.sync->describe()},
      {"code", recipe_.code->describe()},
      {"dense wire", recipe_.refresh_code->describe()},
      {"bias_correction", recipe_.bias_correction ? "True" : "False"},
      {"number of parameter groups", std::to_string(slabs_.size())},
  };
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    const std::vector<TensorSpec>& tensors = slabs_[g].tensors;
    fingerprint.emplace_back("number of tensors in parameter group " + std::to_string(g),
                             std::to_string(tensors.size()));
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      fingerprint.emplace_back("tensor " + std::to_string(i) + " of parameter group " + std::to_string(g),
                               "'" + tensors[i].name + "' with " + std::to_string(tensors[i].numel) + " elements");
    }
  }
  return fingerprint;
}

void Engine::Impl::attach(Communicator& communicator, std::span<const Tensor> tensors, const Fingerprint& settings,
                          bool broadcast, std::string_view error, int threads) {
  std::string failure(error);
  if (failure.empty() && tensors.size() != tensors_) {
    failure = "got " + std::to_string(tensors.size()) + " tensors, the layout has " + std::to_string(tensors_);
  }
  Fingerprint fingerprint = layout_fingerprint();
  fingerprint.insert(fingerprint.end(), settings.begin(), settings.end());
  agree(communicator, fingerprint, failure);

  const bool again = wire_.send.data != nullptr;
  if (again && attached_to_ == nullptr && (communicator.size() != ranks_ || communicator.rank() != rank_)) {
    throw InvalidArgument("the group had " + std::to_string(ranks_) + " ranks before, now " +
                          std::to_string(communicator.size()));
  }
  rank_ = communicator.rank();
  ranks_ = communicator.size();

  std::vector<ExchangeSlab> dense;
  std::vector<ExchangeSlab> compressed;
  const int support = recipe_.preconditioner->support();
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    Slab& slab = slabs_[g];
    slab.layout.emplace(slab.tensors, ranks_);
    slab.piece_born.resize(slab.layout->pieces.size());
    slab.piece_support.resize(slab.layout->pieces.size());
    slab.born.resize(slab.layout->blocks.size());
    slab.support_mean.resize(slab.tensors.size());
    if (recipe_.code->error_feedback() && slab.server_error == nullptr) {
      slab.server_error = allocator_("server_error", static_cast<std::int64_t>(g), slab.layout->chunk.elements);
    }
  }
  for (Slab& slab : slabs_) {
    ExchangeSlab exchange;
    exchange.layout = &*slab.layout;
    exchange.born = slab.born;
    exchange.frozen = slab.frozen;
    dense.push_back(exchange);
    exchange.support = support < 0 ? nullptr : slab.own[static_cast<std::size_t>(support)];
    exchange.server_error = slab.server_error;
    compressed.push_back(std::move(exchange));
  }
  mean_.emplace(*mean_code_, dense, rank_, ranks_);
  dense_.emplace(*recipe_.refresh_code, std::move(dense), rank_, ranks_);
  compressed_.emplace(*recipe_.code, std::move(compressed), rank_, ranks_);

  // Between rounds `send` holds the momentum of before a local step: see step_group.
  std::size_t momentum = 0;
  for (Slab& slab : slabs_) {
    slab.wire_offset = momentum;
    momentum += (static_cast<std::size_t>(slab.numel) * sizeof(float) + 63) / 64 * 64;
  }
  const auto ranks = static_cast<std::size_t>(ranks_);
  std::size_t body = std::max(compressed_->body_bytes(), (momentum + ranks - 1) / ranks);
  if (ranks_ > 1) body = std::max(body, mean_->body_bytes());
  body = std::max(body, dense_through_wire() ? dense_->body_bytes() : 0);
  if (again) Exchange::release(communicator, wire_);
  const std::int64_t sent = wire_.bytes_sent;
  const std::int64_t received = wire_.bytes_received;
  wire_ = Exchange::allocate(communicator, body);
  wire_.bytes_sent = sent;
  wire_.bytes_received = received;

  for (Slab& slab : slabs_) {
    if (slab.has_anchor) continue;
    for (const Run& run : slab.runs) {
      const Tensor& tensor = tensors[slab.first_tensor + run.tensor];
      float* anchor = slab.anchor + slab.tensor_begin[run.tensor] + run.begin;
      const float* values = read_floats(tensor.data, tensor.dtype, run.begin, run.n, anchor);
      if (values != anchor) std::memcpy(anchor, values, static_cast<std::size_t>(run.n) * sizeof(float));
    }
  }
  if (broadcast && ranks_ > 1) broadcast_anchors(communicator);
  for (Slab& slab : slabs_) {
    if (broadcast && !slab.has_anchor) {
      for (const Run& run : slab.runs) {
        const Tensor& tensor = tensors[slab.first_tensor + run.tensor];
        write_floats(tensor.data, tensor.dtype, run.begin, run.n,
                     slab.anchor + slab.tensor_begin[run.tensor] + run.begin);
      }
    }
    slab.has_anchor = true;
  }
  count_born(threads);
  attached_to_ = &communicator;
}

void Engine::Impl::broadcast_anchors(Communicator& communicator) {
  for (Slab& slab : slabs_) {
    if (slab.has_anchor) continue;
    const std::size_t bytes = static_cast<std::size_t>(slab.numel) * sizeof(float);
    auto* anchor = reinterpret_cast<std::byte*>(slab.anchor);
    for (std::size_t begin = 0; begin < bytes; begin += wire_.receive.bytes) {
      const std::size_t part = std::min(bytes - begin, wire_.receive.bytes);
      if (rank_ == 0) std::memcpy(wire_.receive.data, anchor + begin, part);
      communicator.broadcast({wire_.receive, 0, part}, 0).wait();
      std::memcpy(anchor + begin, wire_.receive.data, part);
      if (rank_ == 0) stats_.setup_bytes_sent += static_cast<std::int64_t>(part);
    }
  }
}

void Engine::Impl::count_born(int threads) {
  const int support = recipe_.preconditioner->support();
  for (Slab& slab : slabs_) {
    const SlabLayout& layout = *slab.layout;
    pool_.parallel_for(static_cast<std::int64_t>(layout.pieces.size()), threads,
                       [&](std::int64_t begin, std::int64_t end) {
                         for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
                           const Piece& piece = layout.pieces[i];
                           slab.piece_born[i] = piece.n;
                           if (support < 0) continue;
                           const float* values = slab.own[static_cast<std::size_t>(support)] + piece.begin;
                           slab.piece_support[i] = kernels().sum_born(piece.n, values, &slab.piece_born[i]);
                         }
                       });
    double sum = 0;
    std::int64_t born = 0;
    for (std::size_t i = 0; i < layout.pieces.size(); ++i) {
      sum += static_cast<double>(slab.piece_support[i]);
      born += slab.piece_born[i];
      const bool last = i + 1 == layout.pieces.size() || layout.pieces[i + 1].tensor != layout.pieces[i].tensor;
      if (!last) continue;
      const auto mean = static_cast<float>(sum / static_cast<double>(born));
      slab.support_mean[static_cast<std::size_t>(layout.pieces[i].tensor)] = std::isfinite(mean) ? mean : 0.0f;
      sum = 0;
      born = 0;
    }
    for (std::size_t b = 0; b < layout.blocks.size(); ++b) {
      slab.born[b] = 0;
      for (std::int64_t i = layout.blocks[b].first_piece; i < layout.blocks[b].end_piece; ++i) {
        slab.born[b] += slab.piece_born[static_cast<std::size_t>(i)];
      }
    }
  }
}

void Engine::Impl::check_layout(std::span<const Tensor> tensors, std::span<const GroupOptions> options) const {
  if (tensors.size() != tensors_) {
    throw InvalidArgument("got " + std::to_string(tensors.size()) + " tensors, the layout has " +
                          std::to_string(tensors_));
  }
  if (options.size() != slabs_.size()) {
    throw InvalidArgument("got options of " + std::to_string(options.size()) + " parameter groups, the layout has " +
                          std::to_string(slabs_.size()));
  }
  for (const Slab& slab : slabs_) {
    for (std::size_t i = 0; i < slab.tensors.size(); ++i) {
      if (slab.tensors[i].numel > 0 && tensors[slab.first_tensor + i].data == nullptr) {
        throw InvalidArgument("tensor '" + slab.tensors[i].name + "' has no memory");
      }
    }
  }
}

void Engine::Impl::check_attached(const Communicator& communicator) const {
  if (attached_to_ != &communicator) {
    throw InvalidArgument(attached_to_ == nullptr ? "the engine is not attached to a communicator"
                                                  : "the engine is attached to another communicator");
  }
}

void Engine::Impl::check_call(const Communicator& communicator, std::span<const Tensor> tensors,
                              std::span<const GroupOptions> options) const {
  check_attached(communicator);
  check_layout(tensors, options);
  for (const GroupOptions& o : options) validate(o);
}

Engine::Engine(Recipe recipe, std::vector<std::vector<TensorSpec>> groups, Allocator allocator)
    : impl_(std::make_unique<Impl>(std::move(recipe), std::move(groups), std::move(allocator))) {}
Engine::~Engine() = default;

void Engine::add_group(std::vector<TensorSpec> tensors) { impl_->add_group(std::move(tensors)); }
void Engine::attach(Communicator& communicator, std::span<const Tensor> tensors, const Fingerprint& settings,
                    bool broadcast, std::string_view error, int threads) {
  impl_->attach(communicator, tensors, settings, broadcast, error, threads);
}
bool Engine::attached() const { return impl_->attached(); }
StepKind Engine::step(Communicator& communicator, std::span<const Tensor> tensors,
                      std::span<const GroupOptions> options, int threads, std::string_view error, double max_norm) {
  return impl_->step(communicator, tensors, options, threads, error, max_norm);
}
void Engine::write_mean(Communicator& communicator, std::span<const Tensor> tensors,
                        std::span<const GroupOptions> options, int threads) {
  impl_->write_mean(communicator, tensors, options, threads);
}
StepKind Engine::next_step(std::span<const GroupOptions> options) const { return impl_->next_step(options); }
void Engine::sync(Communicator& communicator, std::span<const Tensor> tensors, std::span<const GroupOptions> options,
                  int threads, std::string_view error) {
  impl_->sync(communicator, tensors, options, threads, error);
}
void Engine::adopt(std::span<const Tensor> tensors, std::span<const GroupOptions> options,
                   std::span<const std::int64_t> indices) {
  impl_->adopt(tensors, options, indices, false);
}
void Engine::adopt_all(std::span<const Tensor> tensors, std::span<const GroupOptions> options) {
  std::vector<std::int64_t> all(tensors.size());
  std::iota(all.begin(), all.end(), 0);
  impl_->adopt(tensors, options, all, true);
}
void Engine::write_parameters(std::span<const Tensor> tensors, std::span<const GroupOptions> options) const {
  impl_->write_parameters(tensors, options);
}
void Engine::settle() { impl_->settle(); }
const Counters& Engine::counters() const { return impl_->counters(); }
void Engine::set_counters(Counters counters) { impl_->set_counters(std::move(counters)); }
const Stats& Engine::stats() const { return impl_->stats(); }
const Recipe& Engine::recipe() const { return impl_->recipe(); }
float* Engine::vector(std::string_view name, std::int64_t group) const { return impl_->vector(name, group); }
std::vector<std::byte> Engine::save() const { return impl_->save(); }
void Engine::load(std::span<const std::byte> bytes) { impl_->load(bytes); }

}  // namespace zeroone
