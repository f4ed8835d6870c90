// Preconditioners: how a gradient becomes a local step.
//
// They work on tiles: runs of at most kTile elements of one tensor that fit the first-level cache, so that the four
// axes stay apart without passing over memory twice. All pointers of a tile have `n` elements.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace zeroone {

/// Elements of a tile, and the sub-block over which a partial sum of a scale is taken.
inline constexpr std::int64_t kTile = 2048;

/// Scalars of one group in one step, computed in double and rounded once.
struct StepScalars {
  float beta1 = 0, one_minus_beta1 = 0;
  float beta2 = 0, one_minus_beta2 = 0;
  float eps = 0;
  float second_moment_correction = 1;  // 1 / (1 - beta2^k)
  float momentum_weight = 0;           // what m is multiplied by when it enters u
  float lag = 0;                       // u is what is stored plus lag times m: see Preconditioner::local_step
  float step_size = 1;                 // what u is multiplied by when it enters x
  float decay = 1;                     // product of (1 - lr weight_decay) since the anchor
  float momentum_sum = 1;              // S: m = u_bar / S at a sync
  float birth_factor = 0;              // 1 - beta2^k: what a coordinate's first z^2 is multiplied by
  float birth_floor = 0;               // of this tensor: the mean second moment of the coordinates born before
  float pass_factor = 1;               // what v is multiplied by, so that v_hat stays, where a refresh passes a tile by
  bool hold_born = false;              // a refresh changes the second moment of newborn coordinates only
};

/// State and parameter of one tile. `vectors[i]` is the preconditioner's i-th own vector.
struct Tile {
  std::int64_t n = 0;
  float* anchor = nullptr;
  float* momentum = nullptr;
  float* accumulated = nullptr;  // u, without the last local step's term
  float* momentum_before = nullptr;  // written by a local step
  std::array<float*, 4> vectors{};
  float* parameter = nullptr;  // write-only, fp32
  bool stream = false;         // the parameter outgrows the caches: writing may bypass them
};

class Preconditioner {
 public:
  virtual ~Preconditioner() = default;
  virtual std::string_view name() const = 0;

  /// Names of the vectors it keeps, all zero at the start and equal on all ranks. At most four.
  virtual std::span<const std::string_view> vectors() const = 0;

  /// Index of the vector that is > 0 where a coordinate takes part in compressed exchanges ("born"); -1: all do.
  virtual int support() const = 0;

  /// Whether coordinates without support keep their last non-zero gradient, in the slot of their momentum, until a
  /// refresh gives them a start: StepScalars::birth_factor, birth_floor.
  virtual bool has_births() const = 0;

  /// What a refresh exchanges in place of the gradient: it, or what a coordinate without support keeps. May write to
  /// `scratch` and return it.
  virtual const float* offer(const Tile& tile, const float* gradient, float* scratch) const = 0;

  /// A step from the exact mean of what the ranks offered: updates own vectors, momentum and anchor. `offered` is this
  /// rank's part.
  virtual void refresh(const StepScalars& s, const Tile& tile, const float* mean, const float* offered) const = 0;

  /// A refresh in which the tile takes no part: what a step would be made of stays as it is.
  virtual void pass(const StepScalars& s, const Tile& tile) const = 0;

  /// A local step: updates momentum and u, and writes the parameter. False: the gradient is not finite.
  ///
  /// That is known only when the whole gradient has been read, and reading it twice would cost as much as a quarter of
  /// the step. So the step can be taken back: `momentum_before` receives the old momentum, and what is stored as u
  /// afterwards is the u of before the step, which does not depend on this gradient. The caller's next `lag` is this
  /// step's momentum_weight, or 0 after it has taken the step back.
  virtual bool local_step(const StepScalars& s, const Tile& tile, const float* gradient) const = 0;

  /// The u that `local_step` would leave, without writing state. Whether some coordinate without support would keep a
  /// gradient then.
  virtual bool peek(const StepScalars& s, const Tile& tile, const float* gradient, float* out) const = 0;

  /// Applies the average of u over the ranks: anchor, momentum; u = 0. Then the parameter is the anchor. `gradient` as
  /// in `peek`.
  virtual void commit(const StepScalars& s, const Tile& tile, const float* average, const float* gradient) const = 0;

  /// Adds lag m to what is stored as u; the caller's next lag is 0.
  virtual void settle(const StepScalars& s, const Tile& tile) const = 0;

  /// Writes P a - u / D to `out`: the parameter as a function of the state.
  virtual void parameter(const StepScalars& s, const Tile& tile, float* out) const = 0;
};

using PreconditionerPtr = std::shared_ptr<const Preconditioner>;

/// Adam's: m / (sqrt(v_hat) + eps); 0 where v = 0.
PreconditionerPtr adam_preconditioner();

/// Adam's with v held between refreshes, and births of late coordinates: docs/algorithm.md.
PreconditionerPtr held_adam_preconditioner();

}  // namespace zeroone
