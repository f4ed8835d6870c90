// Adam's preconditioner, m / (sqrt(v_hat) + eps), with v held between refreshes. 2202.06009, Alg. 1.
#include "kernels/kernels.h"
#include "zeroone/preconditioner.h"

namespace zeroone {
namespace {

class Adam final : public Preconditioner {
 public:
  std::string_view name() const override { return "Adam, v held"; }

  std::span<const std::string_view> vectors() const override {
    static constexpr std::string_view kNames[] = {"exp_avg_sq"};
    return kNames;
  }

  int support() const override { return 0; }

  void refresh(const StepScalars& s, const Tile& t, const float* mean_gradient) const override {
    kernels().adam_refresh(s, t.n, mean_gradient, t.momentum, v(t), t.anchor);
  }

  bool local_step(const StepScalars& s, const Tile& t, const float* gradient) const override {
    return kernels().adam_local_step(s, t.n, gradient, t.momentum, t.momentum_before, t.accumulated, t.anchor, v(t),
                                     t.parameter, t.stream);
  }

  void settle(const StepScalars& s, const Tile& t) const override {
    kernels().adam_settle(s, t.n, t.momentum, t.accumulated, v(t));
  }

  void peek(const StepScalars& s, const Tile& t, const float* gradient, float* out) const override {
    kernels().adam_peek(s, t.n, gradient, t.momentum, t.accumulated, v(t), out);
  }

  void commit(const StepScalars& s, const Tile& t, const float* average) const override {
    kernels().adam_commit(s, t.n, average, t.momentum, t.accumulated, t.anchor, v(t));
  }

  void parameter(const StepScalars& s, const Tile& t, float* out) const override {
    kernels().adam_parameter(s, t.n, t.momentum, t.accumulated, t.anchor, v(t), out);
  }

 private:
  static float* v(const Tile& t) { return t.vectors[0]; }
};

}  // namespace

PreconditionerPtr adam_preconditioner() {
  static const PreconditionerPtr adam = std::make_shared<Adam>();
  return adam;
}

}  // namespace zeroone
