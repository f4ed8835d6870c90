// Adam's preconditioner, m / (sqrt(v_hat) + eps). 2202.06009, Alg. 1, holds v between refreshes.
#include "kernels/kernels.h"
#include "zeroone/preconditioner.h"

namespace zeroone {
namespace {

class Adam : public Preconditioner {
 public:
  std::string_view name() const override { return "Adam"; }

  std::span<const std::string_view> vectors() const override {
    static constexpr std::string_view kNames[] = {"exp_avg_sq"};
    return kNames;
  }

  int support() const override { return 0; }

  bool has_births() const override { return false; }

  const float* offer(const Tile&, const float* gradient, float*) const override { return gradient; }

  void refresh(const StepScalars& s, const Tile& t, const float* mean, const float*) const override {
    kernels().adam_refresh(s, t.n, mean, t.momentum, v(t), t.anchor);
  }

  void pass(const StepScalars& s, const Tile& t) const override {
    for (std::int64_t i = 0; i < t.n; ++i) v(t)[i] *= s.pass_factor;
  }

  bool local_step(const StepScalars& s, const Tile& t, const float* gradient) const override {
    return kernels().adam_local_step(s, t.n, gradient, t.momentum, t.momentum_before, t.accumulated, t.anchor, v(t),
                                     t.parameter, t.stream);
  }

  void settle(const StepScalars& s, const Tile& t) const override {
    kernels().adam_settle(s, t.n, t.momentum, t.accumulated, v(t));
  }

  bool peek(const StepScalars& s, const Tile& t, const float* gradient, float* out) const override {
    return kernels().adam_peek(s, t.n, gradient, t.momentum, t.accumulated, v(t), out);
  }

  void commit(const StepScalars& s, const Tile& t, const float* average, const float* gradient) const override {
    kernels().adam_commit(s, t.n, average, gradient, t.momentum, t.accumulated, t.anchor, v(t));
  }

  void parameter(const StepScalars& s, const Tile& t, float* out) const override {
    kernels().adam_parameter(s, t.n, t.momentum, t.accumulated, t.anchor, v(t), out);
  }

 protected:
  static float* v(const Tile& t) { return t.vectors[0]; }
};

class HeldAdam final : public Adam {
 public:
  std::string_view name() const override { return "Adam, v held"; }

  bool has_births() const override { return true; }

  const float* offer(const Tile& t, const float* gradient, float* scratch) const override {
    kernels().adam_offer(t.n, gradient, t.momentum, v(t), scratch);
    return scratch;
  }

  void refresh(const StepScalars& s, const Tile& t, const float* mean, const float* offered) const override {
    kernels().adam_birth(s, t.n, mean, offered, t.momentum, v(t), t.anchor);
  }
};

}  // namespace

PreconditionerPtr adam_preconditioner() {
  static const PreconditionerPtr adam = std::make_shared<Adam>();
  return adam;
}

PreconditionerPtr held_adam_preconditioner() {
  static const PreconditionerPtr adam = std::make_shared<HeldAdam>();
  return adam;
}

}  // namespace zeroone
