// The step loop. See engine.h for the contract and docs/arithmetic.md for the operations.
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstring>
#include <string>

#include "engine/hash.h"
#include "engine/impl.h"
#include "engine/memory.h"
#include "kernels/kernels.h"

namespace zeroone {
namespace {

// A message's kind: a StepKind, or one of these.
constexpr std::uint16_t kSyncByCall = 3;
constexpr std::uint16_t kMeanByCall = 4;

class Timer {
 public:
  explicit Timer(double& total) : total_(total), start_(Clock::now()) {}
  ~Timer() { total_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& total_;
  Clock::time_point start_;
};

// lr': the learning rate with the bias correction of m.
double corrected_lr(const Recipe& recipe, const SlabCounters& counters, const GroupOptions& options) {
  return recipe.bias_correction ? options.lr / (1 - std::pow(options.beta1, static_cast<double>(counters.step)))
                                : options.lr;
}

// The shortest text that reads back as this value.
std::string text_of(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::uint64_t hash_settings(std::span<const GroupOptions> options, double max_norm, std::span<const Slab> slabs) {
  std::uint64_t hash = hash_bytes(&max_norm, sizeof max_norm);
  for (const GroupOptions& o : options) {
    const double values[] = {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.maximize ? 1.0 : 0.0};
    hash = hash_bytes(values, sizeof values, hash);
  }
  for (const Slab& slab : slabs) hash = hash_bytes(slab.wanted.data(), slab.wanted.size(), hash);
  return hash;
}

void add_settings(Fingerprint& fingerprint, std::span<const GroupOptions> options, double max_norm,
                  std::span<const Slab> slabs) {
  fingerprint.emplace_back("max_norm", text_of(max_norm));
  for (const Slab& slab : slabs) {
    for (std::size_t i = 0; i < slab.tensors.size(); ++i) {
      fingerprint.emplace_back("tensor '" + slab.tensors[i].name + "'", slab.wanted[i] != 0 ? "frozen" : "trained");
    }
  }
  for (std::size_t g = 0; g < options.size(); ++g) {
    const std::string of = " of parameter group " + std::to_string(g);
    const GroupOptions& o = options[g];
    fingerprint.emplace_back("lr" + of, text_of(o.lr));
    std::string betas = text_of(o.beta1);  // appended to: GCC 12 warns of "(" + a temporary
    betas.append(", ").append(text_of(o.beta2));
    fingerprint.emplace_back("betas" + of, betas);
    fingerprint.emplace_back("eps" + of, text_of(o.eps));
    fingerprint.emplace_back("weight_decay" + of, text_of(o.weight_decay));
    fingerprint.emplace_back("maximize" + of, o.maximize ? "True" : "False");
  }
}

}  // namespace

StepScalars Engine::Impl::scalars(const Slab& slab, const SlabCounters& c, const GroupOptions& o,
                                  bool stepping) const {
  const bool weighted = recipe_.accumulate == Accumulate::kSteps;
  // Before the first step there is no correction, and nothing that it could touch.
  const double lr = c.step == 0 ? o.lr : corrected_lr(recipe_, c, o);
  const bool corrected = recipe_.bias_correction && c.refreshes > 0;
  StepScalars s;
  s.beta1 = static_cast<float>(o.beta1);
  s.one_minus_beta1 = static_cast<float>(1 - o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - o.beta2);
  s.eps = static_cast<float>(o.eps);
  s.second_moment_correction =
      corrected ? static_cast<float>(1 / (1 - std::pow(o.beta2, static_cast<double>(c.refreshes)))) : 1.0f;
  // A step at lr = 0 leaves u as it is.
  s.momentum_weight = !stepping || o.lr == 0 ? 0.0f : weighted ? static_cast<float>(lr) : 1.0f;
  s.lag = slab.lag;
  s.step_size = weighted ? 1.0f : static_cast<float>(lr);
  s.decay = static_cast<float>(c.decay);
  s.momentum_sum = static_cast<float>(c.sum);
  return s;
}

const float* Engine::Impl::gradient(const Round& round, std::size_t group, std::size_t tensor, std::int64_t begin,
                                    std::int64_t n, bool zero, float* scratch) const {
  Tensor t = round.tensors[slabs_[group].first_tensor + tensor];
  if (zero) t.gradient = nullptr;
  const float factor = t.gradient_factor * round.clip;
  return read_gradient(t, round.options[group].maximize ? -factor : factor, begin, n, scratch);
}

float Engine::Impl::clip_factor(double max_norm, double squares) {
  const double factor = max_norm / (std::sqrt(squares) + 1e-6);
  return std::isfinite(squares) ? static_cast<float>(std::min(1.0, factor)) : 1.0f;
}

void Engine::Impl::clip_locally(Round& round) {
  double total = 0;
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    squares_.assign(slabs_[g].runs.size(), 0.0);
    for_runs(g, round.threads, [&](std::size_t i, const Run& run, std::int64_t) {
      alignas(64) float scratch[kTile];
      squares_[i] = sum_of_squares(run.n, gradient(round, g, run.tensor, run.begin, run.n, false, scratch));
    });
    for (const double part : squares_) total += part;
  }
  round.clip = clip_factor(round.max_norm, total);
}

void Engine::Impl::read_wanted(std::span<const Tensor> tensors) {
  for (Slab& slab : slabs_) {
    for (std::size_t i = 0; i < slab.tensors.size(); ++i) slab.wanted[i] = tensors[slab.first_tensor + i].frozen ? 1 : 0;
  }
}

void Engine::Impl::freeze_wanted() {
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    std::vector<std::int64_t>& frozen = next_.slabs[g].frozen;
    frozen.clear();
    for (std::size_t i = 0; i < slabs_[g].tensors.size(); ++i) {
      if (slabs_[g].wanted[i] != 0) frozen.push_back(static_cast<std::int64_t>(i));
    }
  }
}

void Engine::Impl::mark_frozen(const Counters& counters) {
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    std::fill(slabs_[g].frozen.begin(), slabs_[g].frozen.end(), 0);
    for (const std::int64_t i : counters.slabs[g].frozen) slabs_[g].frozen[static_cast<std::size_t>(i)] = 1;
  }
}

StepScalars Engine::Impl::tensor_scalars(std::size_t group, std::size_t tensor, const GroupOptions& options) const {
  const Slab& slab = slabs_[group];
  StepScalars s = scalars(slab, counters_.slabs[group], options, false);
  if (slab.frozen[tensor] != 0) {  // no step of the interval was its
    s.decay = 1;
    s.lag = 0;
  }
  return s;
}

void Engine::Impl::start_next(std::span<const GroupOptions> options) {
  next_ = counters_;
  lr_.resize(options.size());
  for (std::size_t g = 0; g < options.size(); ++g) lr_[g] = options[g].lr;
  Schedule::observe(next_.refresh, lr_);
  Schedule::observe(next_.sync, lr_);
}

StepKind Engine::Impl::plan(std::span<const GroupOptions> options) {
  start_next(options);
  ++next_.step;
  for (SlabCounters& slab : next_.slabs) ++slab.step;
  const bool first = next_.refresh.index == 0;  // the first step is a refresh, whatever the schedule
  hold_born_ = false;
  if (!any_pending(next_) && (first || recipe_.refresh->reached(next_.refresh, next_.step))) {
    hold_born_ = !first && next_.step > recipe_.refresh->until();
    if (!hold_born_) {
      for (SlabCounters& slab : next_.slabs) ++slab.refreshes;
      return StepKind::kRefresh;
    }
    if (next_.births_due) {
      for (SlabCounters& slab : next_.slabs) slab.refreshes = std::max<std::int64_t>(slab.refreshes, 1);  // a late group's
      return StepKind::kRefresh;
    }
    recipe_.refresh->advance(next_.refresh, next_.step, lr_);  // passed
  }
  for (std::size_t g = 0; g < options.size(); ++g) {
    const GroupOptions& o = options[g];
    if (o.lr == 0) continue;  // changes nothing but the step count
    SlabCounters& slab = next_.slabs[g];
    slab.sum += recipe_.accumulate == Accumulate::kSteps ? corrected_lr(recipe_, slab, o) : 1.0;
    slab.decay *= 1 - o.lr * o.weight_decay;
    ++slab.pending;
  }
  return any_pending(next_) && recipe_.sync->due(next_.sync, next_.step) ? StepKind::kSync : StepKind::kLocal;
}

StepKind Engine::Impl::next_step(std::span<const GroupOptions> options) {
  if (options.size() != slabs_.size()) {
    throw InvalidArgument("got options of " + std::to_string(options.size()) + " parameter groups, the layout has " +
                          std::to_string(slabs_.size()));
  }
  return plan(options);
}

Tile Engine::Impl::tile(const Slab& slab, std::int64_t begin, std::int64_t n) const {
  Tile tile;
  tile.n = n;
  tile.anchor = slab.anchor + begin;
  tile.momentum = slab.momentum + begin;
  tile.accumulated = slab.accumulated + begin;
  for (std::size_t i = 0; i < recipe_.preconditioner->vectors().size(); ++i) tile.vectors[i] = slab.own[i] + begin;
  return tile;
}

std::string Engine::Impl::error_of_call(const Communicator& communicator, std::span<const Tensor> tensors,
                                        std::span<const GroupOptions> options, std::string_view error) const {
  check_attached(communicator);
  if (!error.empty()) return std::string(error);
  try {
    check_call(communicator, tensors, options);
  } catch (const InvalidArgument& invalid) {
    return invalid.what();
  }
  return {};
}

StepKind Engine::Impl::step(Communicator& communicator, std::span<const Tensor> tensors,
                            std::span<const GroupOptions> options, int threads, std::string_view error,
                            double max_norm) {
  const std::string own_error = error_of_call(communicator, tensors, options, error);
  Round round{communicator, tensors, options, threads, own_error, 0, max_norm};
  StepKind kind = StepKind::kLocal;
  if (options.size() == slabs_.size()) kind = plan(options);
  const bool alone = kind == StepKind::kLocal || ranks_ == 1;
  if (alone && !own_error.empty()) throw InvalidArgument(own_error);
  round.kind = static_cast<std::uint16_t>(kind);
  // What is frozen changes with a round, which verifies that all ranks want the same, and never inside an interval: a
  // tensor's u, and S and P, are of whole intervals.
  const bool inside = any_pending(counters_);
  if (own_error.empty()) {
    read_wanted(tensors);
    if (!inside && kind != StepKind::kLocal) freeze_wanted();
  }
  mark_frozen(next_);
  double seconds = 0;
  bool done = false;
  try {
    if (max_norm != kNoClipping && kind != StepKind::kRefresh && own_error.empty()) clip_locally(round);
    done = in_step([&] {
      const Timer timer(seconds);
      if (kind == StepKind::kLocal) return local_step(round);
      return kind == StepKind::kRefresh ? refresh_round(round) : sync_round(round);
    });
  } catch (...) {
    mark_frozen(counters_);
    throw;
  }
  if (!done) kind = StepKind::kSkipped;
  if (kind == StepKind::kSync && inside) freeze_wanted();
  finish_step(kind, seconds);
  mark_frozen(counters_);
  return kind;
}

void Engine::Impl::finish_step(StepKind kind, double seconds) {
  if (kind == StepKind::kSkipped) {
    ++stats_.skipped_steps;
    return;
  }
  if (kind == StepKind::kRefresh) recipe_.refresh->advance(next_.refresh, next_.step, lr_);
  if (kind != StepKind::kLocal) {
    recipe_.sync->advance(next_.sync, next_.step, lr_);  // a refresh counts as a sync
    next_.last_sync = next_.step;
  }
  counters_ = next_;
  if (kind == StepKind::kRefresh && stats_.refreshes > 1) stats_.refresh_seconds += seconds;
  if (kind == StepKind::kSync && stats_.syncs > 1) stats_.sync_seconds += seconds;
  ++stats_.steps;
  stats_.dense_bytes += 8 * total_numel() * (ranks_ - 1) / ranks_;
}

bool Engine::Impl::gradient_finite(const Round& round, std::size_t group) {
  std::atomic<bool> finite{true};
  for_runs(group, round.threads, [&](std::size_t, const Run& run, std::int64_t) {
    alignas(64) float scratch[kTile];
    const float* values = gradient(round, group, run.tensor, run.begin, run.n, false, scratch);
    if (!kernels().all_finite(run.n, values)) finite.store(false, std::memory_order_relaxed);
  });
  return finite;
}

bool Engine::Impl::step_group(const Round& round, std::size_t group, bool zero) {
  constexpr std::int64_t kBeyondCaches = std::int64_t{1} << 22;
  const bool stream = total_numel() >= kBeyondCaches;
  Slab& slab = slabs_[group];
  auto* momentum_before = reinterpret_cast<float*>(wire_.send.data + slab.wire_offset);
  const StepScalars s = scalars(slab, next_.slabs[group], round.options[group], true);
  std::atomic<bool> finite{true};
  for_runs(group, round.threads, [&](std::size_t, const Run& run, std::int64_t slab_begin) {
    alignas(64) float gradient_scratch[kTile];
    alignas(64) float parameter_scratch[kTile];
    const Tensor& tensor = round.tensors[slab.first_tensor + run.tensor];
    Tile t = tile(slab, slab_begin, run.n);
    t.momentum_before = momentum_before + slab_begin;
    const bool direct = tensor.dtype == DType::kFloat32;
    t.parameter = direct ? static_cast<float*>(tensor.data) + run.begin : parameter_scratch;
    t.stream = direct && stream;
    const float* values = gradient(round, group, run.tensor, run.begin, run.n, zero, gradient_scratch);
    if (!recipe_.preconditioner->local_step(s, t, values)) finite.store(false, std::memory_order_relaxed);
    if (!direct) write_floats(tensor.data, tensor.dtype, run.begin, run.n, t.parameter);
  });
  slab.lag = s.momentum_weight;
  return finite;
}

bool Engine::Impl::local_step(const Round& round) {
  const Timer timer(stats_.local_seconds);
  bool finite = true;
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    // At lr = 0 nothing changes, but the rule is one for the whole gradient.
    finite = (round.options[g].lr == 0 ? gradient_finite(round, g) : step_group(round, g, false)) && finite;
  }
  if (finite) return true;

  ++stats_.nonfinite_gradients;
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    if (round.options[g].lr == 0) continue;
    Slab& slab = slabs_[g];
    for_runs(g, round.threads, [&](std::size_t, const Run& run, std::int64_t begin) {
      const auto offset = static_cast<std::size_t>(begin) * sizeof(float);
      std::memcpy(slab.momentum + begin, wire_.send.data + slab.wire_offset + offset,
                  static_cast<std::size_t>(run.n) * sizeof(float));
    });
    slab.lag = 0;
    if (ranks_ > 1) step_group(round, g, true);
  }
  if (ranks_ > 1) return true;
  write_parameters(round.tensors, round.options);  // as they were
  return false;
}

bool Engine::Impl::inspect_headers(const Round& round, const Header& own, std::span<const Header> headers) {
  bool any_finite = false;
  keeps_ = false;
  bool alike = true;
  for (const Header& header : headers) {
    any_finite = any_finite || (header.flags & kNotFinite) == 0;
    keeps_ = keeps_ || (header.flags & kKeepsGradients) != 0;
    alike = alike && header.magic == own.magic && header.kind == own.kind && header.step == own.step &&
            header.settings == own.settings && header.adopted == own.adopted && (header.flags & kFailed) == 0;
  }
  if (alike) return any_finite;
  // All ranks have seen the same headers, so all come here.
  static constexpr const char* kKinds[] = {"a local step", "a refresh", "a sync", "sync() called",
                                           "consolidated() called"};
  Fingerprint fingerprint = {{"what to do", kKinds[own.kind] + (" at step " + std::to_string(own.step))}};
  add_settings(fingerprint, round.options, round.max_norm, slabs_);
  fingerprint.emplace_back("parameters loaded since the last round",
                           own.adopted == 0 ? "none" : "values with hash " + std::to_string(own.adopted));
  agree(round.communicator, fingerprint, round.error);
  throw DisagreementError("ranks sent different headers at step " + std::to_string(own.step));
}

bool Engine::Impl::run_round(const Round& round, Exchange& exchange, bool finite, bool keeps) {
  Header header;
  header.kind = round.kind;
  header.flags = static_cast<std::uint16_t>((finite ? 0 : kNotFinite) | (round.error.empty() ? 0 : kFailed) |
                                            (keeps ? kKeepsGradients : 0));
  header.step = next_.step;
  header.lr = round.options.empty() ? 0 : round.options[0].lr;
  header.settings = hash_settings(round.options, round.max_norm, slabs_);
  header.adopted = adopted_;
  exchange.set_header(wire_, header);

  const Timer timer(stats_.exchange_seconds);
  const auto inspect = [&](std::span<const Header> headers) { return inspect_headers(round, header, headers); };
  const bool combined = exchange.run(round.communicator, *recipe_.collective, wire_, pool_, round.threads, inspect);
  if (!finite) ++stats_.nonfinite_gradients;
  if (combined) {
    ++stats_.rounds;
    adopted_ = 0;
  }
  return combined;
}

StepScalars Engine::Impl::refresh_scalars(const Round& round, std::size_t group) const {
  const GroupOptions& options = round.options[group];
  const SlabCounters& counters = next_.slabs[group];
  StepScalars s = scalars(slabs_[group], counters, options, true);
  s.step_size = static_cast<float>(corrected_lr(recipe_, counters, options));
  s.decay = static_cast<float>(1 - options.lr * options.weight_decay);
  const double corrected = 1 - std::pow(options.beta2, static_cast<double>(counters.refreshes));
  s.birth_factor = static_cast<float>(corrected);
  s.hold_born = hold_born_;
  if (recipe_.bias_correction && !hold_born_ && counters.refreshes > 1) {
    s.pass_factor =
        static_cast<float>(corrected / (1 - std::pow(options.beta2, static_cast<double>(counters.refreshes - 1))));
  }
  return s;
}

bool Engine::Impl::refresh_round(const Round& round) {
  const bool through_wire = dense_through_wire();
  // What this rank offers: its gradient, and on coordinates without support what it keeps. Where that is not finite, or
  // the wire can't carry it: the gradient alone, what is kept alone, or nothing. What is kept and not offered is dropped:
  // it would be in the way of every refresh.
  struct Offer {
    bool gradient, kept;
  };
  constexpr Offer kOffers[] = {{true, true}, {true, false}, {false, true}, {false, false}};
  Offer offer = kOffers[0];
  const auto offered = [&](std::size_t g, const Piece& piece, float* gradient_scratch, float* scratch) {
    const float* values = gradient(round, g, static_cast<std::size_t>(piece.tensor), piece.tensor_begin, piece.n,
                                   !offer.gradient, gradient_scratch);
    if (!offer.kept) return values;
    return recipe_.preconditioner->offer(tile(slabs_[g], piece.begin, piece.n), values, scratch);
  };
  bool finite = true;
  if (through_wire) {
    {
      const Timer timer(stats_.encode_seconds);
      for (const Offer& attempt : kOffers) {
        if (!round.error.empty()) break;  // after an error of this rank nobody reads more than the header
        offer = attempt;
        const bool fits =
            dense_->encode(wire_, pool_, round.threads, [&](std::size_t g, const Piece& piece, float* scratch) {
              alignas(64) float values[kTile];
              const float* from = offered(g, piece, values, scratch);
              if (from != values) return from;
              std::copy_n(values, piece.n, scratch);  // values end here
              return static_cast<const float*>(scratch);
            });
        if (fits) break;
      }
      finite = offer.gradient;
    }
    if (!run_round(round, *dense_, finite)) return false;
    stats_.alike_refreshes += dense_->alike();
  } else {
    for (std::size_t g = 0; g < slabs_.size(); ++g) finite = gradient_finite(round, g) && finite;
    if (!finite) {
      ++stats_.nonfinite_gradients;
      return false;
    }
    ++stats_.rounds;
    adopted_ = 0;
  }

  const Timer timer(stats_.commit_seconds);
  const auto mean_of = [&](std::size_t g, const Piece& piece, float* gradient_scratch, float* scratch) {
    if (!through_wire) return offered(g, piece, gradient_scratch, scratch);
    dense_->decode_result(wire_, g, piece, scratch);
    return static_cast<const float*>(scratch);
  };
  float clip = 1;
  if (round.max_norm != kNoClipping) {
    // The norm of the mean gradient: not of older gradients, which coordinates without support offer. At the first
    // refresh none has support, and all offer their gradient.
    const int support = recipe_.preconditioner->support();
    const bool masked = recipe_.preconditioner->has_births() && any_born();
    double total = 0;
    for (std::size_t g = 0; g < slabs_.size(); ++g) {
      squares_.assign(slabs_[g].layout->pieces.size(), 0.0);
      for_pieces(g, round.threads, [&](std::size_t i, const Piece& piece) {
        if (slabs_[g].frozen[static_cast<std::size_t>(piece.tensor)] != 0) return;
        alignas(64) float values[kTile];
        alignas(64) float scratch[kTile];
        const float* mean = mean_of(g, piece, values, scratch);
        if (masked) {
          const float* of_piece = slabs_[g].own[static_cast<std::size_t>(support)] + piece.begin;
          for (std::int64_t e = 0; e < piece.n; ++e) scratch[e] = of_piece[e] > 0 ? mean[e] : 0.0f;
          mean = scratch;
        }
        squares_[i] = sum_of_squares(piece.n, mean);
      });
      for (const double part : squares_) total += part;
    }
    clip = clip_factor(round.max_norm, total);
  }
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    const Slab& slab = slabs_[g];
    const StepScalars of_group = refresh_scalars(round, g);
    for_pieces(g, round.threads, [&](std::size_t, const Piece& piece) {
      alignas(64) float values[kTile];
      alignas(64) float scratch[kTile];
      alignas(64) float own[kTile];
      const auto tensor_index = static_cast<std::size_t>(piece.tensor);
      const Tile t = tile(slab, piece.begin, piece.n);
      if (slab.frozen[tensor_index] != 0) {
        recipe_.preconditioner->pass(of_group, t);
        return;
      }
      const float* mean = mean_of(g, piece, values, scratch);
      if (clip != 1) {
        for (std::int64_t e = 0; e < piece.n; ++e) scratch[e] = clip * mean[e];
        mean = scratch;
      }
      const float* part = mean;
      if (recipe_.preconditioner->has_births()) part = offered(g, piece, values, own);
      StepScalars s = of_group;
      s.birth_floor = slab.support_mean[tensor_index];
      recipe_.preconditioner->refresh(s, t, mean, part);
      const Tensor& tensor = round.tensors[slab.first_tensor + tensor_index];
      write_floats(tensor.data, tensor.dtype, piece.tensor_begin, piece.n, t.anchor);
    });
  }
  next_.births_due = false;
  count_born(round.threads);
  ++stats_.refreshes;
  return true;
}

bool Engine::Impl::sync_round(const Round& round) {
  const bool stepping = round.kind == static_cast<std::uint16_t>(StepKind::kSync);
  std::vector<ExchangeSlab>& exchange_slabs = compressed_->slabs();
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    const SlabCounters& c = next_.slabs[g];
    slabs_[g].scalars = scalars(slabs_[g], c, round.options[g], stepping);
    exchange_slabs[g].active = c.pending > 0;
    exchange_slabs[g].rho = static_cast<float>(c.previous_sum > 0 ? std::min(1.0, c.sum / c.previous_sum) : 1.0);
  }
  // b = u + rho worker_error, from the gradient on: nothing is stored before the commit.
  const auto gradient_of = [&](std::size_t g, const Piece& piece, bool zero, float* scratch) {
    return gradient(round, g, static_cast<std::size_t>(piece.tensor), piece.tensor_begin, piece.n, zero || !stepping,
                    scratch);
  };
  // What the local step of a group sees of its gradient: at lr = 0 it changes nothing.
  const auto stepped = [&](std::size_t g, const float* values) {
    static constexpr float kZeros[kTile] = {};
    return round.options[g].lr == 0 ? kZeros : values;
  };
  const auto candidate = [&](std::size_t g, const Piece& piece, const float* values, float* out) {
    const Slab& slab = slabs_[g];
    const Tile t = tile(slab, piece.begin, piece.n);
    const bool keeps = recipe_.preconditioner->peek(slab.scalars, t, values, out);
    if (slab.worker_error != nullptr) {
      const int support = recipe_.preconditioner->support();
      kernels().add_residual(piece.n, out, exchange_slabs[g].rho, slab.worker_error + piece.begin,
                             support < 0 ? nullptr : t.vectors[static_cast<std::size_t>(support)], out);
    }
    return keeps;
  };

  bool finite = true;
  std::atomic<bool> keeps{false};
  {
    const Timer timer(stats_.encode_seconds);
    const auto encode = [&](bool zero) {
      std::atomic<bool> gradient_finite{true};
      const bool encoded =
          compressed_->encode(wire_, pool_, round.threads, [&](std::size_t g, const Piece& piece, float* out) {
            alignas(64) float scratch[kTile];
            const float* values = gradient_of(g, piece, zero, scratch);
            // Also where the preconditioner would not look: the rule is one for the whole gradient.
            if (!kernels().all_finite(piece.n, values)) gradient_finite.store(false, std::memory_order_relaxed);
            if (candidate(g, piece, stepped(g, values), out)) keeps.store(true, std::memory_order_relaxed);
            return static_cast<const float*>(out);
          });
      return encoded && gradient_finite;
    };
    if (round.error.empty()) {  // after an error of this rank nobody reads more than the header
      finite = encode(false);
      for (std::size_t g = 0; g < slabs_.size() && stepping; ++g) {
        if (!exchange_slabs[g].active) finite = gradient_finite(round, g) && finite;
      }
      if (!finite) {
        keeps = false;
        encode(true);
      }
    }
  }
  const bool births = recipe_.preconditioner->has_births();
  if (!run_round(round, *compressed_, finite, births && keeps)) return false;
  next_.births_due = keeps_;

  const Timer timer(stats_.commit_seconds);
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    const Slab& slab = slabs_[g];
    SlabCounters& counters = next_.slabs[g];
    if (counters.pending == 0) continue;
    for_pieces(g, round.threads, [&](std::size_t, const Piece& piece) {
      alignas(64) float scratch[kTile];
      alignas(64) float average[kTile];
      alignas(64) float b[kTile];
      const auto tensor_index = static_cast<std::size_t>(piece.tensor);
      if (slab.frozen[tensor_index] != 0) {  // its residual lives in units of u
        if (slab.worker_error == nullptr) return;
        for (std::int64_t e = 0; e < piece.n; ++e) slab.worker_error[piece.begin + e] *= exchange_slabs[g].rho;
        return;
      }
      const float* values = stepped(g, gradient_of(g, piece, !finite, scratch));
      if (slab.worker_error != nullptr) {
        candidate(g, piece, values, b);
        compressed_->decode_own(wire_, g, piece, average);
        kernels().subtract(piece.n, b, average, slab.worker_error + piece.begin);
      }
      compressed_->decode_result(wire_, g, piece, average);
      const Tile t = tile(slab, piece.begin, piece.n);
      recipe_.preconditioner->commit(slab.scalars, t, average, values);
      const Tensor& tensor = round.tensors[slab.first_tensor + tensor_index];
      write_floats(tensor.data, tensor.dtype, piece.tensor_begin, piece.n, t.anchor);
    });
    slabs_[g].lag = 0;
    counters.previous_sum = counters.sum;
    counters.sum = 0;
    counters.decay = 1;
    counters.pending = 0;
  }
  if (recipe_.code->error_feedback()) compressed_->commit_server_error(wire_, pool_, round.threads);
  ++stats_.syncs;
  return true;
}

void Engine::Impl::write_mean(Communicator& communicator, std::span<const Tensor> tensors,
                              std::span<const GroupOptions> options, int threads) {
  check_call(communicator, tensors, options);
  if (!any_pending(counters_) || ranks_ == 1) return;
  settle();
  read_wanted(tensors);
  next_ = counters_;
  Round round{communicator, tensors, options, threads, {}, kMeanByCall};
  const std::int64_t before = wire_.bytes_sent;
  in_step([&] {
    mean_->encode(wire_, pool_, threads, [&](std::size_t g, const Piece& piece, float*) {
      return static_cast<const float*>(slabs_[g].accumulated + piece.begin);
    });
    return run_round(round, *mean_, true);
  });
  const std::int64_t sent = wire_.bytes_sent - before;  // no round of the training
  wire_.bytes_sent -= sent;
  wire_.bytes_received -= sent;
  stats_.mean_bytes_sent += sent;
  --stats_.rounds;
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    const Slab& slab = slabs_[g];
    const StepScalars s = scalars(slab, counters_.slabs[g], options[g], false);
    for_pieces(g, threads, [&](std::size_t, const Piece& piece) {
      alignas(64) float average[kTile];
      alignas(64) float x[kTile];
      if (slab.frozen[static_cast<std::size_t>(piece.tensor)] != 0) return;
      mean_->decode_result(wire_, g, piece, average);
      Tile t = tile(slab, piece.begin, piece.n);
      t.accumulated = average;
      recipe_.preconditioner->parameter(s, t, x);
      const Tensor& tensor = tensors[slab.first_tensor + static_cast<std::size_t>(piece.tensor)];
      write_floats(tensor.data, tensor.dtype, piece.tensor_begin, piece.n, x);
    });
  }
}

void Engine::Impl::sync(Communicator& communicator, std::span<const Tensor> tensors,
                        std::span<const GroupOptions> options, int threads, std::string_view error) {
  const std::string own_error = error_of_call(communicator, tensors, options, error);
  const bool pending = any_pending(counters_);
  if (!own_error.empty() && (!pending || ranks_ == 1)) throw InvalidArgument(own_error);
  if (!pending) return;
  if (own_error.empty()) read_wanted(tensors);
  start_next(options);
  double seconds = 0;
  in_step([&] {
    const Timer timer(seconds);
    return sync_round({communicator, tensors, options, threads, own_error, kSyncByCall});
  });
  freeze_wanted();
  if (stats_.syncs > 1) stats_.sync_seconds += seconds;
  recipe_.sync->advance(next_.sync, next_.step, lr_);
  next_.last_sync = next_.step;
  counters_ = next_;
  mark_frozen(counters_);
}

}  // namespace zeroone
