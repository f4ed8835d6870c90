// The whole algorithm once more, all ranks in one object, written to be read: no tiles, no threads,
// no messages.
//
// It follows the specification (2202.06009, sections 3 to 5, as docs/arithmetic.md fixes it) and
// shares with src/ only plain data. Twin<float> repeats the documented operations bit for bit
// (compile with -ffp-contract=off); Twin<double> is for algebraic identities.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "zeroone/engine.h"
#include "zeroone/schedule.h"
#include "zeroone/types.h"

namespace zeroone::test {

/// A schedule as data. An event is due from `next` on, and never after `until`.
struct PlainSchedule {
  enum class Kind { kEveryStep, kInterval, kDoubling, kLearningRateTied, kSteps };

  Kind kind = Kind::kEveryStep;
  std::int64_t number = 0;  // interval, kappa or max_interval
  std::int64_t until = kNever;
  std::vector<std::int64_t> list;

  ScheduleState start() const {
    ScheduleState state;
    if (kind == Kind::kSteps) state.next = list.front();
    return state;
  }

  static void observe(ScheduleState& state, const std::vector<double>& lr) {
    state.peak_lr.resize(lr.size(), 0.0);
    for (std::size_t g = 0; g < lr.size(); ++g)
      state.peak_lr[g] = std::max(state.peak_lr[g], lr[g]);
  }

  bool reached(const ScheduleState& state, std::int64_t t) const { return t >= state.next; }
  bool due(const ScheduleState& state, std::int64_t t) const {
    return reached(state, t) && t <= until;
  }

  void advance(ScheduleState& state, std::int64_t t, const std::vector<double>& lr) const {
    state.next = next_after(state, t, lr);
    state.last_lr = lr;
    ++state.index;
  }

 private:
  std::int64_t next_after(const ScheduleState& state, std::int64_t t,
                          const std::vector<double>& lr) const {
    switch (kind) {
      case Kind::kEveryStep: {  // after `until` a point every t / 16 steps, in powers of two
        std::int64_t gap = 1;
        while (t >= until && 32 * gap <= t) gap *= 2;
        return t + gap;
      }
      case Kind::kInterval:
        return t + number;
      case Kind::kDoubling:
        return t + power_of_two(state.index / number);
      case Kind::kLearningRateTied:
        return t + tied_gap(state, lr);
      case Kind::kSteps: {
        const auto later = std::upper_bound(list.begin(), list.end(), t);
        return later == list.end() ? kNever : *later;
      }
    }
    return kNever;
  }

  static std::int64_t power_of_two(std::int64_t exponent) {
    return std::int64_t{1} << std::min<std::int64_t>(exponent, 40);
  }

  // min(H, 2^floor(log2(peak / lr))) of the group with the smallest peak / lr; 1 when a learning
  // rate has risen.
  std::int64_t tied_gap(const ScheduleState& state, const std::vector<double>& lr) const {
    bool any_peak = false;
    double ratio = HUGE_VAL;  // peak / lr
    for (std::size_t g = 0; g < lr.size(); ++g) {
      if (!state.last_lr.empty() && lr[g] > state.last_lr[g]) return 1;
      if (state.peak_lr[g] == 0) continue;
      any_peak = true;
      if (lr[g] > 0) ratio = std::min(ratio, state.peak_lr[g] / lr[g]);
    }
    if (!any_peak) return 1;
    return std::isinf(ratio) ? number : std::min(number, power_of_two(std::ilogb(ratio)));
  }
};

inline PlainSchedule plain_every_step(std::int64_t until = kNever) {
  return {PlainSchedule::Kind::kEveryStep, 0, until, {}};
}
inline PlainSchedule plain_interval(std::int64_t interval) {
  return {PlainSchedule::Kind::kInterval, interval, kNever, {}};
}
inline PlainSchedule plain_doubling(std::int64_t kappa, std::int64_t until = kNever) {
  return {PlainSchedule::Kind::kDoubling, kappa, until, {}};
}
inline PlainSchedule plain_tied(std::int64_t max_interval) {
  return {PlainSchedule::Kind::kLearningRateTied, max_interval, kNever, {}};
}
inline PlainSchedule plain_steps(std::vector<std::int64_t> list) {
  return {PlainSchedule::Kind::kSteps, 0, kNever, std::move(list)};
}

struct PlainRecipe {
  PlainSchedule refresh;
  PlainSchedule sync;
  Scale scale = Scale::kL1;
  bool bias_correction = true;
  bool sums_momentum = false;  // 1-bit Adam: u sums m; the learning rate comes after the average
  bool births = true;          // section 5d; false: AdamW, whose v is never held
  DType dense = DType::kFloat32;  // what a dense exchange carries
};

/// Nearest value of a type; trial.h.
inline float nearest(float x, DType dtype);

/// How a slab is cut into chunks and blocks: docs/arithmetic.md, "Mean and codes".
struct Layout {
  struct Block {
    std::int64_t chunk_begin, begin, end;
  };

  Layout(std::vector<std::int64_t> sizes, int world) : tensors(std::move(sizes)) {
    for (const std::int64_t n : tensors) numel += n;
    chunk = 8 * ((numel + 8 * world - 1) / (8 * world));
    for (int rank = 0; rank < world; ++rank) {
      const std::size_t before = blocks.size();
      const std::int64_t chunk_begin = rank * chunk;
      std::int64_t tensor_begin = 0;
      for (const std::int64_t n : tensors) {
        const std::int64_t begin = std::max(tensor_begin, chunk_begin);
        const std::int64_t end = std::min(tensor_begin + n, chunk_begin + chunk);
        if (begin < end) blocks.push_back({chunk_begin, begin, end});
        tensor_begin += n;
      }
      most_blocks = std::max(most_blocks, static_cast<std::int64_t>(blocks.size() - before));
    }
  }

  std::int64_t one_bit_bytes() const { return 4 * most_blocks + chunk / 8; }
  std::int64_t dense_bytes(DType wire = DType::kFloat32) const {
    return static_cast<std::int64_t>(size_of(wire)) * chunk;
  }

  std::int64_t numel = 0;
  std::int64_t chunk = 0;  // L
  std::int64_t most_blocks = 0;
  std::vector<Block> blocks;
  std::vector<std::int64_t> tensors;
};

/// A block is cut at the multiples of 2048 from the start of its chunk.
inline std::vector<std::pair<std::int64_t, std::int64_t>> pieces(const Layout::Block& block) {
  constexpr std::int64_t kPiece = 2048;
  std::vector<std::pair<std::int64_t, std::int64_t>> result;
  for (std::int64_t begin = block.begin; begin < block.end;) {
    const std::int64_t piece = (begin - block.chunk_begin) / kPiece;
    const std::int64_t end = std::min(block.end, block.chunk_begin + (piece + 1) * kPiece);
    result.emplace_back(begin, end);
    begin = end;
  }
  return result;
}

template <typename Real>
Real halved(std::array<Real, 16> lanes) {
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

/// decode(encode(b)) of the sign code, all chunks: +-scale per block, 0 where not born.
template <typename Real>
std::vector<Real> one_bit(const Layout& layout, const std::vector<char>& born, Scale kind,
                          const std::vector<Real>& b) {
  std::vector<Real> decoded(b.size(), Real(0));
  for (const Layout::Block& block : layout.blocks) {
    double sum = 0;
    std::int64_t count = 0;
    for (const auto& [begin, end] : pieces(block)) {
      std::array<Real, 16> lanes{};
      for (std::int64_t i = begin; i < end; ++i) {
        const Real x = b[static_cast<std::size_t>(i)];
        const Real term = kind == Scale::kL1 ? std::abs(x) : x * x;
        lanes[static_cast<std::size_t>(i - begin) % 16] += term;
        count += born[static_cast<std::size_t>(i)];
      }
      sum += static_cast<double>(halved(lanes));
    }
    if (count == 0) continue;
    const double mean = sum / static_cast<double>(count);
    const Real scale = static_cast<Real>(kind == Scale::kL1 ? mean : std::sqrt(mean));
    for (auto i = static_cast<std::size_t>(block.begin); i < static_cast<std::size_t>(block.end);
         ++i) {
      if (born[i]) decoded[i] = b[i] < 0 ? -scale : scale;
    }
  }
  return decoded;
}

/// One-bit mean of z over the ranks; updates the residuals. `server_error` is that of all ranks'
/// chunks, in order.
template <typename Real>
std::vector<Real> one_bit_mean(const Layout& layout, const std::vector<char>& born, Scale kind,
                               Real rho, const std::vector<std::vector<Real>>& z,
                               std::vector<std::vector<Real>>& worker_error,
                               std::vector<Real>& server_error) {
  const auto n = static_cast<std::size_t>(layout.numel);
  const std::size_t world = z.size();
  std::vector<Real> c(n), b(n);
  for (std::size_t r = 0; r < world; ++r) {
    for (std::size_t i = 0; i < n; ++i)
      b[i] = born[i] ? z[r][i] + rho * worker_error[r][i] : Real(0);
    const std::vector<Real> decoded = one_bit(layout, born, kind, b);
    for (std::size_t i = 0; i < n; ++i) {
      worker_error[r][i] = b[i] - decoded[i];
      c[i] = r == 0 ? decoded[i] : c[i] + decoded[i];
    }
  }
  for (std::size_t i = 0; i < n; ++i) {
    c[i] = c[i] / static_cast<Real>(world);
    c[i] = born[i] ? c[i] + rho * server_error[i] : Real(0);
  }
  std::vector<Real> result = one_bit(layout, born, kind, c);
  for (std::size_t i = 0; i < n; ++i) server_error[i] = c[i] - result[i];
  return result;
}

template <typename Real>
class Twin {
 public:
  using Vector = std::vector<Real>;
  using Gradients = std::vector<std::vector<Vector>>;  // [rank][group][element]

  /// State of one group. What is equal on all ranks is there once.
  struct Slab {
    Layout layout;
    Vector a, v, server_error;                  // of server_error rank j holds chunk j
    std::vector<Vector> m, u, worker_error, x;  // [rank]
    bool synced = false;                        // in this step
  };

  /// `groups[g]`: elements of each tensor; `initial[g]`: all of the group's parameters.
  Twin(PlainRecipe recipe, const std::vector<std::vector<std::int64_t>>& groups, int world,
       const std::vector<Vector>& initial)
      : recipe_(std::move(recipe)), world_(static_cast<std::size_t>(world)) {
    counters_.refresh = recipe_.refresh.start();
    counters_.sync = recipe_.sync.start();
    counters_.slabs.resize(groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const Vector zero(initial[g].size(), Real(0));
      const std::vector<Vector> zeros(world_, zero);
      slabs_.push_back({Layout(groups[g], world), initial[g], zero, zero, zeros, zeros, zeros,
                        std::vector<Vector>(world_, initial[g]), false});
    }
  }

  StepKind step(const Gradients& gradients, const std::vector<GroupOptions>& options) {
    const std::vector<double> lr = learning_rates(options);
    Counters next = counters_;
    const std::int64_t t = ++next.step;
    PlainSchedule::observe(next.refresh, lr);
    PlainSchedule::observe(next.sync, lr);
    const bool moves = std::any_of(lr.begin(), lr.end(), [](double x) { return x != 0; });
    const bool point = (t == 1 || recipe_.refresh.reached(next.refresh, t)) && !pending();
    const bool held = t > 1 && t > recipe_.refresh.until;  // v of born coordinates, and k
    const bool refresh = point && (!held || counters_.births_due);
    const bool sync = !refresh && recipe_.sync.due(next.sync, t) && (pending() || moves);

    std::vector<char> finite;
    for (const std::vector<Vector>& of_rank : gradients) finite.push_back(all_finite(of_rank));
    const bool hopeless = std::find(finite.begin(), finite.end(), 1) == finite.end();
    if (hopeless && (refresh || sync || world_ == 1)) return StepKind::kSkipped;

    counters_ = std::move(next);
    for (std::size_t g = 0; g < slabs_.size(); ++g) {
      ++counters_.slabs[g].step;
      std::vector<Vector> gradient(world_);
      for (std::size_t r = 0; r < world_; ++r) {
        gradient[r] = gradients[r][g];
        for (Real& x : gradient[r]) x = !finite[r] ? Real(0) : options[g].maximize ? -x : x;
      }
      if (refresh) {
        refresh_slab(g, gradient, options[g], held);
      } else if (options[g].lr != 0) {
        local_step(g, gradient, options[g]);
      }
      if (sync && counters_.slabs[g].pending > 0) sync_slab(g, options[g]);
    }
    if (refresh) counters_.births_due = false;
    if (sync) note_kept();
    if (point) recipe_.refresh.advance(counters_.refresh, t, lr);
    if (refresh || sync) note_sync(lr);
    return refresh ? StepKind::kRefresh : sync ? StepKind::kSync : StepKind::kLocal;
  }

  /// A sync by call. False: nothing was pending.
  bool sync(const std::vector<GroupOptions>& options) {
    if (!pending()) return false;
    for (std::size_t g = 0; g < slabs_.size(); ++g) {
      if (counters_.slabs[g].pending > 0) sync_slab(g, options[g]);
    }
    note_kept();
    note_sync(learning_rates(options));
    return true;
  }

  const Slab& slab(std::size_t g) const { return slabs_[g]; }
  std::size_t slabs() const { return slabs_.size(); }
  const Counters& counters() const { return counters_; }
  bool pending() const {
    return std::any_of(counters_.slabs.begin(), counters_.slabs.end(),
                       [](const SlabCounters& c) { return c.pending > 0; });
  }

  /// D of one coordinate.
  Real denominator(std::size_t g, std::size_t i, const GroupOptions& options) const {
    const std::int64_t k = counters_.slabs[g].refreshes;
    const double correction = recipe_.bias_correction && k > 0
                                  ? 1 / (1 - std::pow(options.beta2, static_cast<double>(k)))
                                  : 1;
    return std::sqrt(slabs_[g].v[i] * static_cast<Real>(correction)) +
           static_cast<Real>(options.eps);
  }

  /// lr' of the current step.
  double step_size(std::size_t g, const GroupOptions& options) const {
    const double t = static_cast<double>(counters_.slabs[g].step);
    return recipe_.bias_correction ? options.lr / (1 - std::pow(options.beta1, t)) : options.lr;
  }

  /// E = mean of worker_error + server_error: section 6.
  std::vector<double> residual(std::size_t g) const {
    std::vector<double> e(slabs_[g].server_error.begin(), slabs_[g].server_error.end());
    for (const Vector& error : slabs_[g].worker_error) {
      for (std::size_t i = 0; i < e.size(); ++i)
        e[i] += static_cast<double>(error[i]) / static_cast<double>(world_);
    }
    return e;
  }

 private:
  static std::vector<double> learning_rates(const std::vector<GroupOptions>& options) {
    std::vector<double> lr;
    for (const GroupOptions& o : options) lr.push_back(o.lr);
    return lr;
  }

  static char all_finite(const std::vector<Vector>& vectors) {
    for (const Vector& v : vectors) {
      for (const Real x : v) {
        if (!std::isfinite(x)) return 0;
      }
    }
    return 1;
  }

  void note_sync(const std::vector<double>& lr) {
    recipe_.sync.advance(counters_.sync, counters_.step, lr);
    counters_.last_sync = counters_.step;
  }

  // q(z, s) of docs/arithmetic.md.
  Real quotient(std::size_t g, std::size_t i, Real z, Real s, const GroupOptions& options) const {
    return slabs_[g].v[i] > 0 ? (s * z) / denominator(g, i, options) : Real(0);
  }

  // Where v = 0 the slot of m has the last gradient that was not zero.
  Real kept(Real m, Real gradient) const {
    return recipe_.births && gradient == 0 ? m : gradient;
  }

  // "I hold gradients of unborn coordinates", on some rank; of the groups that took part.
  void note_kept() {
    counters_.births_due = false;
    for (const Slab& s : slabs_) {
      if (!s.synced || !recipe_.births) continue;
      for (const Vector& m : s.m) {
        for (std::size_t i = 0; i < m.size(); ++i)
          counters_.births_due = counters_.births_due || (s.v[i] == 0 && m[i] != 0);
      }
    }
    for (Slab& s : slabs_) s.synced = false;
  }

  // Mean of v over each tensor's born coordinates, for each coordinate; 0 where none is born.
  std::vector<Real> floors(const Slab& s) const {
    std::vector<Real> result(s.v.size());
    std::int64_t begin = 0;
    for (const std::int64_t n : s.layout.tensors) {
      const std::int64_t end = begin + n;
      double sum = 0;
      std::int64_t born = 0;
      for (const Layout::Block& block : s.layout.blocks) {
        if (block.begin < begin || block.begin >= end) continue;
        for (const auto& [from, to] : pieces(block)) {
          std::array<Real, 16> lanes{};
          for (std::int64_t i = from; i < to; ++i) {
            lanes[static_cast<std::size_t>(i - from) % 16] += s.v[static_cast<std::size_t>(i)];
            born += s.v[static_cast<std::size_t>(i)] > 0;
          }
          sum += static_cast<double>(halved(lanes));
        }
      }
      Real mean = born == 0 ? Real(0) : static_cast<Real>(sum / static_cast<double>(born));
      if (!std::isfinite(mean)) mean = 0;
      std::fill(result.begin() + begin, result.begin() + end, mean);
      begin = end;
    }
    return result;
  }

  // What the dense exchange makes of x.
  Real through_wire(Real x) const {
    return recipe_.dense == DType::kFloat32
               ? x
               : static_cast<Real>(nearest(static_cast<float>(x), recipe_.dense));
  }

  static Real momentum(Real m, Real gradient, const GroupOptions& options) {
    const Real kept = static_cast<Real>(options.beta1) * m;
    const Real added = static_cast<Real>(1 - options.beta1) * gradient;
    return kept + added;
  }

  void refresh_slab(std::size_t g, const std::vector<Vector>& gradient, const GroupOptions& options,
                    bool held) {
    Slab& s = slabs_[g];
    if (!held || counters_.slabs[g].refreshes == 0) ++counters_.slabs[g].refreshes;
    const auto k = static_cast<double>(counters_.slabs[g].refreshes);
    const Real birth_factor = static_cast<Real>(1 - std::pow(options.beta2, k));
    const Vector floor = floors(s);
    const Real lr = static_cast<Real>(step_size(g, options));
    const Real decay = static_cast<Real>(1 - options.lr * options.weight_decay);
    for (std::size_t i = 0; i < s.a.size(); ++i) {
      const bool born = s.v[i] > 0 || !recipe_.births;
      Vector offered;
      for (std::size_t r = 0; r < world_; ++r)
        offered.push_back(born ? gradient[r][i] : kept(s.m[r][i], gradient[r][i]));
      Real mean = through_wire(offered[0]);
      for (std::size_t r = 1; r < world_; ++r) mean = mean + through_wire(offered[r]);
      mean = through_wire(mean / static_cast<Real>(world_));
      const Real square = mean * mean;
      if (born && !held) {
        const Real remembered = static_cast<Real>(options.beta2) * s.v[i];
        const Real added = static_cast<Real>(1 - options.beta2) * square;
        s.v[i] = remembered + added;
      } else if (!born && mean != 0) {
        const Real own = birth_factor * square;
        s.v[i] = std::max(own, floor[i]);
      }
      const Real m = born ? momentum(s.m[0][i], mean, options)
                          : static_cast<Real>(1 - options.beta1) * mean;
      const Real decayed = decay * s.a[i];
      s.a[i] = decayed - quotient(g, i, m, lr, options);
      for (std::size_t r = 0; r < world_; ++r) {
        s.m[r][i] = born || s.v[i] > 0 ? m : offered[r];
        s.x[r][i] = s.a[i];
      }
    }
  }

  void local_step(std::size_t g, const std::vector<Vector>& gradient, const GroupOptions& options) {
    Slab& s = slabs_[g];
    SlabCounters& c = counters_.slabs[g];
    const double lr = step_size(g, options);
    const double weight = recipe_.sums_momentum ? 1 : lr;
    ++c.pending;
    c.sum += weight;
    c.decay *= 1 - options.lr * options.weight_decay;
    const Real eta = static_cast<Real>(recipe_.sums_momentum ? lr : 1);
    for (std::size_t r = 0; r < world_; ++r) {
      for (std::size_t i = 0; i < s.a.size(); ++i) {
        s.m[r][i] = s.v[i] > 0 ? momentum(s.m[r][i], gradient[r][i], options)
                               : kept(s.m[r][i], gradient[r][i]);
        const Real weighted = static_cast<Real>(weight) * s.m[r][i];
        s.u[r][i] = s.v[i] > 0 ? s.u[r][i] + weighted : Real(0);
        const Real decayed = static_cast<Real>(c.decay) * s.a[i];
        s.x[r][i] = decayed - quotient(g, i, s.u[r][i], eta, options);
      }
    }
  }

  void sync_slab(std::size_t g, const GroupOptions& options) {
    Slab& s = slabs_[g];
    SlabCounters& c = counters_.slabs[g];
    std::vector<char> born;
    for (const Real v : s.v) born.push_back(v > 0);
    const double rho = c.previous_sum > 0 ? std::min(1.0, c.sum / c.previous_sum) : 1;
    const Vector average = one_bit_mean(s.layout, born, recipe_.scale, static_cast<Real>(rho), s.u,
                                        s.worker_error, s.server_error);
    const Real eta = static_cast<Real>(recipe_.sums_momentum ? step_size(g, options) : 1);
    for (std::size_t i = 0; i < s.a.size(); ++i) {
      const Real decayed = static_cast<Real>(c.decay) * s.a[i];
      s.a[i] = decayed - quotient(g, i, average[i], eta, options);
      for (std::size_t r = 0; r < world_; ++r) {
        if (s.v[i] > 0) s.m[r][i] = average[i] / static_cast<Real>(c.sum);
        s.u[r][i] = 0;
        s.x[r][i] = s.a[i];
      }
    }
    s.synced = true;
    c.previous_sum = c.sum;
    c.sum = 0;
    c.decay = 1;
    c.pending = 0;
  }

  PlainRecipe recipe_;
  std::size_t world_;
  std::vector<Slab> slabs_;
  Counters counters_;
};

}  // namespace zeroone::test
