// SIMD kernels with Highway. This file is compiled once per instruction set with that set's flags; ZEROONE_ISA names
// it. It defines one symbol, the table: nothing compiled here may be linked into code for older processors.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "formulas.h"
#include "kernels.h"

namespace zeroone {
namespace {

namespace f = formulas;
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, f::kLanes>;
using V = hn::Vec<D>;
constexpr D d;
constexpr std::int64_t kN = static_cast<std::int64_t>(hn::MaxLanes(d));
constexpr std::int64_t kVectors = f::kLanes / kN;  // per group of kLanes elements
static_assert(kN > 1 && f::kLanes % kN == 0);

HWY_INLINE V load(const float* p) { return hn::LoadU(d, p); }
HWY_INLINE void store(V x, float* p) { hn::StoreU(x, d, p); }
HWY_INLINE V set(float x) { return hn::Set(d, x); }

// StepScalars in registers, and formulas.h on vectors.
struct Formulas {
  explicit HWY_INLINE Formulas(const StepScalars& s)
      : beta1(set(s.beta1)),
        one_minus_beta1(set(s.one_minus_beta1)),
        beta2(set(s.beta2)),
        one_minus_beta2(set(s.one_minus_beta2)),
        eps(set(s.eps)),
        correction(set(s.second_moment_correction)),
        weight(set(s.momentum_weight)),
        lag(set(s.lag)),
        step_size(set(s.step_size)),
        decay(set(s.decay)),
        momentum_sum(set(s.momentum_sum)),
        birth_factor(set(s.birth_factor)),
        birth_floor(set(s.birth_floor)) {}

  HWY_INLINE V momentum(V m, V g) const { return hn::Add(hn::Mul(beta1, m), hn::Mul(one_minus_beta1, g)); }
  static HWY_INLINE V kept(V m, V g) { return hn::IfThenElse(hn::Eq(g, hn::Zero(d)), m, g); }
  HWY_INLINE V next_momentum(V m, V g, V v) const {
    return hn::IfThenElse(born(v), momentum(m, g), kept(m, g));
  }
  HWY_INLINE V second_moment(V v, V g) const {
    return hn::Add(hn::Mul(beta2, v), hn::Mul(one_minus_beta2, hn::Mul(g, g)));
  }
  HWY_INLINE V update(V z, V v) const {
    const V denominator = hn::Add(hn::Sqrt(hn::Mul(v, correction)), eps);
    return hn::IfThenElseZero(born(v), hn::Div(hn::Mul(step_size, z), denominator));
  }
  static HWY_INLINE V accumulate(V weight, V u, V m, V v) {
    return hn::IfThenElseZero(born(v), hn::Add(u, hn::Mul(weight, m)));
  }
  HWY_INLINE V parameter(V a, V z, V v) const { return hn::Sub(hn::Mul(decay, a), update(z, v)); }

  static HWY_INLINE hn::Mask<D> born(V v) { return hn::Gt(v, hn::Zero(d)); }

  V beta1, one_minus_beta1, beta2, one_minus_beta2, eps, correction, weight, lag, step_size, decay, momentum_sum;
  V birth_factor, birth_floor;
};

void adam_refresh(const StepScalars& s, std::int64_t n, const float* HWY_RESTRICT g, float* HWY_RESTRICT m,
                  float* HWY_RESTRICT v, float* HWY_RESTRICT a) {
  const Formulas formulas(s);
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    const V gi = load(g + i);
    const V vi = formulas.second_moment(load(v + i), gi);
    const V mi = formulas.momentum(load(m + i), gi);
    store(vi, v + i);
    store(mi, m + i);
    store(formulas.parameter(load(a + i), mi, vi), a + i);
  }
  for (; i < n; ++i) {
    v[i] = f::second_moment(s, v[i], g[i]);
    m[i] = f::momentum(s, m[i], g[i]);
    a[i] = f::parameter(s, a[i], m[i], v[i]);
  }
}

template <bool kStream>
HWY_INLINE void write(V x, float* p) {
  if constexpr (kStream) {
    hn::Stream(x, d, p);
  } else {
    store(x, p);
  }
}

// Whether no lane is infinite or NaN.
HWY_INLINE bool finite_lanes(V x) {
  float lane[f::kLanes];
  store(x, lane);
  bool finite = true;
  for (std::int64_t j = 0; j < kN; ++j) finite = finite && f::finite(lane[j]);
  return finite;
}

template <bool kStream>
bool local_step(const StepScalars& s, std::int64_t n, const float* HWY_RESTRICT g, float* HWY_RESTRICT m,
                float* HWY_RESTRICT m_before, float* HWY_RESTRICT u, const float* HWY_RESTRICT a,
                const float* HWY_RESTRICT v, float* HWY_RESTRICT x) {
  const Formulas formulas(s);
  V zero_if_finite = hn::Zero(d);  // 0 * g is NaN where g is not finite, and a sum with a NaN is NaN
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    const V gi = load(g + i);
    const V vi = load(v + i);
    const V before = load(m + i);
    const V ui = Formulas::accumulate(formulas.lag, load(u + i), before, vi);
    const V mi = formulas.next_momentum(before, gi, vi);
    zero_if_finite = hn::Add(zero_if_finite, hn::Mul(hn::Zero(d), gi));
    store(mi, m + i);
    store(ui, u + i);
    write<kStream>(before, m_before + i);
    write<kStream>(formulas.parameter(load(a + i), Formulas::accumulate(formulas.weight, ui, mi, vi), vi), x + i);
  }
  if constexpr (kStream) hwy::FlushStream();
  bool finite = finite_lanes(zero_if_finite);
  for (; i < n; ++i) {
    finite = finite && f::finite(g[i]);
    m_before[i] = m[i];
    u[i] = f::accumulate(s.lag, u[i], m[i], v[i]);
    m[i] = f::next_momentum(s, m[i], g[i], v[i]);
    x[i] = f::parameter(s, a[i], f::accumulate(s.momentum_weight, u[i], m[i], v[i]), v[i]);
  }
  return finite;
}

bool adam_local_step(const StepScalars& s, std::int64_t n, const float* g, float* m, float* m_before, float* u,
                     const float* a, const float* v, float* x, bool stream) {
  const std::uintptr_t addresses = reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(m_before);
  const bool aligned = addresses % (kN * sizeof(float)) == 0;
  return (stream && aligned ? local_step<true> : local_step<false>)(s, n, g, m, m_before, u, a, v, x);
}

void adam_offer(std::int64_t n, const float* HWY_RESTRICT g, const float* HWY_RESTRICT m, const float* HWY_RESTRICT v,
                float* HWY_RESTRICT out) {
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    const V gi = load(g + i);
    store(hn::IfThenElse(Formulas::born(load(v + i)), gi, Formulas::kept(load(m + i), gi)), out + i);
  }
  for (; i < n; ++i) out[i] = v[i] > 0 ? g[i] : f::kept(m[i], g[i]);
}

void adam_birth(const StepScalars& s, std::int64_t n, const float* HWY_RESTRICT mean,
                const float* HWY_RESTRICT offered, float* HWY_RESTRICT m, float* HWY_RESTRICT v,
                float* HWY_RESTRICT a) {
  const Formulas formulas(s);
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    const V z = load(mean + i);
    const V before = load(v + i);
    const V old = s.hold_born ? before : formulas.second_moment(before, z);
    const V own = hn::Mul(formulas.birth_factor, hn::Mul(z, z));
    const V floored = hn::IfThenElse(hn::Gt(own, formulas.birth_floor), own, formulas.birth_floor);
    const V newborn = hn::IfThenZeroElse(hn::Eq(z, hn::Zero(d)), floored);
    const auto was_born = Formulas::born(before);
    const V vi = hn::IfThenElse(was_born, old, newborn);
    const V first = hn::IfThenElse(Formulas::born(vi), hn::Mul(formulas.one_minus_beta1, z), load(offered + i));
    const V mi = hn::IfThenElse(was_born, formulas.momentum(load(m + i), z), first);
    store(vi, v + i);
    store(mi, m + i);
    store(formulas.parameter(load(a + i), mi, vi), a + i);
  }
  for (; i < n; ++i) {
    const float before = v[i];
    v[i] = f::refreshed_moment(s, before, mean[i]);
    m[i] = f::refreshed_momentum(s, m[i], mean[i], offered[i], before, v[i]);
    a[i] = f::parameter(s, a[i], m[i], v[i]);
  }
}

void adam_settle(const StepScalars& s, std::int64_t n, const float* HWY_RESTRICT m, float* HWY_RESTRICT u,
                 const float* HWY_RESTRICT v) {
  const V lag = set(s.lag);
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) store(Formulas::accumulate(lag, load(u + i), load(m + i), load(v + i)), u + i);
  for (; i < n; ++i) u[i] = f::accumulate(s.lag, u[i], m[i], v[i]);
}

bool adam_peek(const StepScalars& s, std::int64_t n, const float* HWY_RESTRICT g, const float* HWY_RESTRICT m,
               const float* HWY_RESTRICT u, const float* HWY_RESTRICT v, float* HWY_RESTRICT out) {
  const Formulas formulas(s);
  V kept = hn::Zero(d);  // all bits of what is kept
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    const V mi = load(m + i);
    const V vi = load(v + i);
    const V gi = load(g + i);
    const V before = Formulas::accumulate(formulas.lag, load(u + i), mi, vi);
    store(Formulas::accumulate(formulas.weight, before, formulas.momentum(mi, gi), vi), out + i);
    kept = hn::Or(kept, hn::IfThenZeroElse(Formulas::born(vi), Formulas::kept(mi, gi)));
  }
  const auto magnitude = hn::BitCast(hn::RebindToUnsigned<D>(), hn::Abs(kept));
  bool any = !hn::AllTrue(hn::RebindToUnsigned<D>(), hn::Eq(magnitude, hn::Zero(hn::RebindToUnsigned<D>())));
  for (; i < n; ++i) {
    const float before = f::accumulate(s.lag, u[i], m[i], v[i]);
    out[i] = f::accumulate(s.momentum_weight, before, f::momentum(s, m[i], g[i]), v[i]);
    any = any || (!(v[i] > 0) && f::kept(m[i], g[i]) != 0);
  }
  return any;
}

void adam_commit(const StepScalars& s, std::int64_t n, const float* HWY_RESTRICT average, const float* HWY_RESTRICT g,
                 float* HWY_RESTRICT m, float* HWY_RESTRICT u, float* HWY_RESTRICT a, const float* HWY_RESTRICT v) {
  const Formulas formulas(s);
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    const V average_i = load(average + i);
    const V vi = load(v + i);
    const V mean = hn::Div(average_i, formulas.momentum_sum);
    store(formulas.parameter(load(a + i), average_i, vi), a + i);
    store(hn::IfThenElse(Formulas::born(vi), mean, Formulas::kept(load(m + i), load(g + i))), m + i);
    store(hn::Zero(d), u + i);
  }
  for (; i < n; ++i) {
    a[i] = f::parameter(s, a[i], average[i], v[i]);
    m[i] = v[i] > 0 ? average[i] / s.momentum_sum : f::kept(m[i], g[i]);
    u[i] = 0;
  }
}

void adam_parameter(const StepScalars& s, std::int64_t n, const float* HWY_RESTRICT m, const float* HWY_RESTRICT u,
                    const float* HWY_RESTRICT a, const float* HWY_RESTRICT v, float* HWY_RESTRICT out) {
  const Formulas formulas(s);
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    const V vi = load(v + i);
    const V ui = Formulas::accumulate(formulas.lag, load(u + i), load(m + i), vi);
    store(formulas.parameter(load(a + i), ui, vi), out + i);
  }
  for (; i < n; ++i) out[i] = f::parameter(s, a[i], f::accumulate(s.lag, u[i], m[i], v[i]), v[i]);
}

// Bit i of the result: whether b[i] < 0, for the kN elements of one vector.
HWY_INLINE std::uint32_t negative_bits(V b) {
  std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, hn::Lt(b, hn::Zero(d)), bytes);
  std::uint32_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return bits & ((1u << kN) - 1);
}

// scale where the bit is clear, -scale where it is set; `bits` holds those of vector `j` of a group.
HWY_INLINE V signed_scale(std::uint32_t bits, std::int64_t j, V scale, V minus_scale) {
  std::uint8_t bytes[8] = {};  // LoadMaskBits may read eight
  const std::uint32_t own = (bits >> (j * kN)) & ((1u << kN) - 1);
  std::memcpy(bytes, &own, sizeof own);
  return hn::IfThenElse(hn::LoadMaskBits(d, bytes), minus_scale, scale);
}

HWY_INLINE std::uint32_t load_group(const std::uint8_t* bits) {
  std::uint16_t group = 0;
  std::memcpy(&group, bits, sizeof group);
  return group;
}

template <Scale kScale>
float encode(std::int64_t n, const float* HWY_RESTRICT b, std::uint8_t* HWY_RESTRICT bits) {
  V sum[kVectors];
  for (std::int64_t j = 0; j < kVectors; ++j) sum[j] = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + f::kLanes <= n; i += f::kLanes) {
    std::uint32_t group = 0;
    for (std::int64_t j = 0; j < kVectors; ++j) {
      const V x = load(b + i + j * kN);
      sum[j] = hn::Add(sum[j], kScale == Scale::kL1 ? hn::Abs(x) : hn::Mul(x, x));
      group |= negative_bits(x) << (j * kN);
    }
    const auto word = static_cast<std::uint16_t>(group);
    std::memcpy(bits + i / 8, &word, sizeof word);
  }
  float lane[f::kLanes];
  for (std::int64_t j = 0; j < kVectors; ++j) store(sum[j], lane + j * kN);
  for (std::int64_t tail = i; tail < n; ++tail) {
    if (tail % 8 == 0) bits[tail / 8] = 0;
    bits[tail / 8] = static_cast<std::uint8_t>(bits[tail / 8] | (f::negative(b[tail]) << (tail % 8)));
    lane[tail - i] += kScale == Scale::kL1 ? __builtin_fabsf(b[tail]) : b[tail] * b[tail];
  }
  return f::reduce_lanes(lane);
}

float sign_encode(std::int64_t n, const float* b, Scale scale, std::uint8_t* bits) {
  return (scale == Scale::kL1 ? encode<Scale::kL1> : encode<Scale::kL2>)(n, b, bits);
}

void sign_decode(std::int64_t n, const std::uint8_t* HWY_RESTRICT bits, float scale, const float* HWY_RESTRICT support,
                 float* HWY_RESTRICT out) {
  const V plus = set(scale);
  const V minus = set(-scale);
  std::int64_t i = 0;
  for (; i + f::kLanes <= n; i += f::kLanes) {
    const std::uint32_t group = load_group(bits + i / 8);
    for (std::int64_t j = 0; j < kVectors; ++j) {
      V x = signed_scale(group, j, plus, minus);
      if (support != nullptr) x = hn::IfThenElseZero(Formulas::born(load(support + i + j * kN)), x);
      store(x, out + i + j * kN);
    }
  }
  for (; i < n; ++i) out[i] = support == nullptr || support[i] > 0 ? f::decoded(bits, i, scale) : 0.0f;
}

void sign_accumulate(std::int64_t n, const std::uint8_t* HWY_RESTRICT bits, float scale, float* HWY_RESTRICT sum) {
  const V plus = set(scale);
  const V minus = set(-scale);
  std::int64_t i = 0;
  for (; i + f::kLanes <= n; i += f::kLanes) {
    const std::uint32_t group = load_group(bits + i / 8);
    for (std::int64_t j = 0; j < kVectors; ++j) {
      float* p = sum + i + j * kN;
      store(hn::Add(load(p), signed_scale(group, j, plus, minus)), p);
    }
  }
  for (; i < n; ++i) sum[i] += f::decoded(bits, i, scale);
}

void add(std::int64_t n, const float* HWY_RESTRICT x, float* HWY_RESTRICT sum) {
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) store(hn::Add(load(sum + i), load(x + i)), sum + i);
  for (; i < n; ++i) sum[i] += x[i];
}

void subtract(std::int64_t n, const float* x, const float* y, float* out) {
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) store(hn::Sub(load(x + i), load(y + i)), out + i);
  for (; i < n; ++i) out[i] = x[i] - y[i];
}

void divide(std::int64_t n, float divisor, float* x) {
  const V by = set(divisor);
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) store(hn::Div(load(x + i), by), x + i);
  for (; i < n; ++i) x[i] /= divisor;
}

void add_residual(std::int64_t n, const float* z, float rho, const float* HWY_RESTRICT residual,
                  const float* HWY_RESTRICT support, float* out) {
  const V factor = set(rho);
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    V x = hn::Add(load(z + i), hn::Mul(factor, load(residual + i)));
    if (support != nullptr) x = hn::IfThenElseZero(Formulas::born(load(support + i)), x);
    store(x, out + i);
  }
  for (; i < n; ++i) out[i] = f::with_residual(z[i], rho, residual[i], support == nullptr ? 1.0f : support[i]);
}

bool all_finite(std::int64_t n, const float* x) {
  V zero_if_finite[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};  // as in local_step
  std::int64_t i = 0;
  for (; i + 4 * kN <= n; i += 4 * kN) {
    for (std::int64_t j = 0; j < 4; ++j) {
      zero_if_finite[j] = hn::Add(zero_if_finite[j], hn::Mul(hn::Zero(d), load(x + i + j * kN)));
    }
  }
  bool finite = finite_lanes(
      hn::Add(hn::Add(zero_if_finite[0], zero_if_finite[1]), hn::Add(zero_if_finite[2], zero_if_finite[3])));
  for (; i < n; ++i) finite = finite && f::finite(x[i]);
  return finite;
}

float sum_born(std::int64_t n, const float* v, std::int64_t* born) {
  V sum[kVectors];
  for (std::int64_t j = 0; j < kVectors; ++j) sum[j] = hn::Zero(d);
  std::int64_t count = 0;
  std::int64_t i = 0;
  for (; i + f::kLanes <= n; i += f::kLanes) {
    for (std::int64_t j = 0; j < kVectors; ++j) {
      const V vi = load(v + i + j * kN);
      sum[j] = hn::Add(sum[j], vi);
      count += static_cast<std::int64_t>(hn::CountTrue(d, Formulas::born(vi)));
    }
  }
  float lane[f::kLanes];
  for (std::int64_t j = 0; j < kVectors; ++j) store(sum[j], lane + j * kN);
  for (std::int64_t tail = i; tail < n; ++tail) {
    lane[tail - i] += v[tail];
    count += v[tail] > 0;
  }
  *born = count;
  return f::reduce_lanes(lane);
}

using D16 = hn::Rebind<std::uint16_t, D>;
using D32 = hn::RebindToUnsigned<D>;
using DHalf = hn::Rebind<hwy::float16_t, D>;
constexpr D16 d16;
constexpr D32 d32;
constexpr DHalf d_half;

void bfloat16_to_float(std::int64_t n, const std::uint16_t* HWY_RESTRICT x, float* HWY_RESTRICT out) {
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    store(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, x + i)))), out + i);
  }
  for (; i < n; ++i) out[i] = f::from_bfloat16(x[i]);
}

void float_to_bfloat16(std::int64_t n, const float* HWY_RESTRICT x, std::uint16_t* HWY_RESTRICT out) {
  const auto one = hn::Set(d32, 1);
  const auto bias = hn::Set(d32, 0x7fff);
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    const V value = load(x + i);
    const auto bits = hn::BitCast(d32, value);
    const auto high = hn::ShiftRight<16>(bits);
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, bias), hn::And(high, one)));
    const auto is_nan = hn::RebindMask(d32, hn::Ne(value, value));
    const auto result = hn::IfThenElse(is_nan, hn::Or(high, hn::Set(d32, 0x40)), rounded);
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(hn::RebindToSigned<D32>(), result)), d16, out + i);
  }
  for (; i < n; ++i) out[i] = f::to_bfloat16(x[i]);
}

void float16_to_float(std::int64_t n, const std::uint16_t* HWY_RESTRICT x, float* HWY_RESTRICT out) {
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    store(hn::PromoteTo(d, hn::BitCast(d_half, hn::LoadU(d16, x + i))), out + i);
  }
  for (; i < n; ++i) out[i] = f::from_float16(x[i]);
}

void float_to_float16(std::int64_t n, const float* HWY_RESTRICT x, std::uint16_t* HWY_RESTRICT out) {
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    hn::StoreU(hn::BitCast(d16, hn::DemoteTo(d_half, load(x + i))), d16, out + i);
  }
  for (; i < n; ++i) out[i] = f::to_float16(x[i]);
}

#define ZEROONE_TEXT_OF(x) #x
#define ZEROONE_TEXT(x) ZEROONE_TEXT_OF(x)

constexpr Kernels kTable = {
    ZEROONE_TEXT(ZEROONE_ISA),
    static_cast<int>(kN),
    adam_refresh,
    adam_local_step,
    adam_offer,
    adam_birth,
    adam_settle,
    adam_peek,
    adam_commit,
    adam_parameter,
    sign_encode,
    sign_decode,
    sign_accumulate,
    add,
    subtract,
    divide,
    add_residual,
    all_finite,
    sum_born,
    bfloat16_to_float,
    float_to_bfloat16,
    float16_to_float,
    float_to_float16,
};

}  // namespace

#if HWY_TARGET == HWY_AVX2
extern const Kernels kAvx2Kernels = kTable;
#elif HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
extern const Kernels kAvx512Kernels = kTable;
#elif HWY_ARCH_ARM_A64
extern const Kernels kNeonKernels = kTable;
#else
#error "simd.cc must be compiled with the flags of AVX2, AVX-512 or NEON"
#endif

}  // namespace zeroone
