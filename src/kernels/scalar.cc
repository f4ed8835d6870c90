// The scalar twin: plain loops over formulas.h.
#include <cmath>

#include "formulas.h"
#include "kernels.h"

namespace zeroone {
namespace {

namespace f = formulas;

void adam_refresh(const StepScalars& s, std::int64_t n, const float* g, float* m, float* v, float* a) {
  for (std::int64_t i = 0; i < n; ++i) {
    v[i] = f::second_moment(s, v[i], g[i]);
    m[i] = f::momentum(s, m[i], g[i]);
    a[i] = f::parameter(s, a[i], m[i], v[i]);
  }
}

bool adam_local_step(const StepScalars& s, std::int64_t n, const float* g, float* m, float* m_before, float* u,
                     const float* a, const float* v, float* x, bool /*stream*/) {
  bool finite = true;
  for (std::int64_t i = 0; i < n; ++i) {
    finite = finite && f::finite(g[i]);
    m_before[i] = m[i];
    u[i] = f::accumulate(s.lag, u[i], m[i], v[i]);
    m[i] = f::next_momentum(s, m[i], g[i], v[i]);
    x[i] = f::parameter(s, a[i], f::accumulate(s.momentum_weight, u[i], m[i], v[i]), v[i]);
  }
  return finite;
}

void adam_offer(std::int64_t n, const float* g, const float* m, const float* v, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = v[i] > 0 ? g[i] : f::kept(m[i], g[i]);
}

void adam_birth(const StepScalars& s, std::int64_t n, const float* mean, const float* offered, float* m, float* v,
                float* a) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float before = v[i];
    v[i] = f::refreshed_moment(s, before, mean[i]);
    m[i] = f::refreshed_momentum(s, m[i], mean[i], offered[i], before, v[i]);
    a[i] = f::parameter(s, a[i], m[i], v[i]);
  }
}

void adam_settle(const StepScalars& s, std::int64_t n, const float* m, float* u, const float* v) {
  for (std::int64_t i = 0; i < n; ++i) u[i] = f::accumulate(s.lag, u[i], m[i], v[i]);
}

bool adam_peek(const StepScalars& s, std::int64_t n, const float* g, const float* m, const float* u, const float* v,
               float* out) {
  bool keeps = false;
  for (std::int64_t i = 0; i < n; ++i) {
    const float before = f::accumulate(s.lag, u[i], m[i], v[i]);
    out[i] = f::accumulate(s.momentum_weight, before, f::momentum(s, m[i], g[i]), v[i]);
    keeps = keeps || (!(v[i] > 0) && f::kept(m[i], g[i]) != 0);
  }
  return keeps;
}

void adam_commit(const StepScalars& s, std::int64_t n, const float* average, const float* g, float* m, float* u,
                 float* a, const float* v) {
  for (std::int64_t i = 0; i < n; ++i) {
    a[i] = f::parameter(s, a[i], average[i], v[i]);
    m[i] = v[i] > 0 ? average[i] / s.momentum_sum : f::kept(m[i], g[i]);
    u[i] = 0;
  }
}

void adam_parameter(const StepScalars& s, std::int64_t n, const float* m, const float* u, const float* a,
                    const float* v, float* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = f::parameter(s, a[i], f::accumulate(s.lag, u[i], m[i], v[i]), v[i]);
  }
}

float sign_encode(std::int64_t n, const float* b, Scale scale, std::uint8_t* bits) {
  float lane[f::kLanes] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    if (i % 8 == 0) bits[i / 8] = 0;
    bits[i / 8] = static_cast<std::uint8_t>(bits[i / 8] | (f::negative(b[i]) << (i % 8)));
    lane[i % f::kLanes] += scale == Scale::kL1 ? std::fabs(b[i]) : b[i] * b[i];
  }
  return f::reduce_lanes(lane);
}

void sign_decode(std::int64_t n, const std::uint8_t* bits, float scale, const float* support, float* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = support == nullptr || support[i] > 0 ? f::decoded(bits, i, scale) : 0.0f;
  }
}

void sign_accumulate(std::int64_t n, const std::uint8_t* bits, float scale, float* sum) {
  for (std::int64_t i = 0; i < n; ++i) sum[i] += f::decoded(bits, i, scale);
}

void add(std::int64_t n, const float* x, float* sum) {
  for (std::int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

void subtract(std::int64_t n, const float* x, const float* y, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = x[i] - y[i];
}

void divide(std::int64_t n, float divisor, float* x) {
  for (std::int64_t i = 0; i < n; ++i) x[i] /= divisor;
}

void add_residual(std::int64_t n, const float* z, float rho, const float* residual, const float* support,
                  float* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = f::with_residual(z[i], rho, residual[i], support == nullptr ? 1.0f : support[i]);
  }
}

bool all_finite(std::int64_t n, const float* x) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (!f::finite(x[i])) return false;
  }
  return true;
}

float sum_born(std::int64_t n, const float* v, std::int64_t* born) {
  float lane[f::kLanes] = {};
  *born = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    lane[i % f::kLanes] += v[i];
    *born += v[i] > 0;
  }
  return f::reduce_lanes(lane);
}

void bfloat16_to_float(std::int64_t n, const std::uint16_t* x, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = f::from_bfloat16(x[i]);
}

void float_to_bfloat16(std::int64_t n, const float* x, std::uint16_t* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = f::to_bfloat16(x[i]);
}

void float16_to_float(std::int64_t n, const std::uint16_t* x, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = f::from_float16(x[i]);
}

void float_to_float16(std::int64_t n, const float* x, std::uint16_t* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = f::to_float16(x[i]);
}

}  // namespace

const Kernels kScalarKernels = {
    "scalar",       1,
    adam_refresh,   adam_local_step,   adam_offer,       adam_birth,       adam_settle,
    adam_peek,      adam_commit,       adam_parameter,   sign_encode,      sign_decode,
    sign_accumulate, add,              subtract,         divide,           add_residual,
    all_finite,     sum_born,          bfloat16_to_float, float_to_bfloat16,
    float16_to_float, float_to_float16,
};

}  // namespace zeroone
