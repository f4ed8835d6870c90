// The scalar form of every formula: the plain twin of the SIMD kernels, which use it for the last few elements.
//
// `static`, so that no copy compiled for one instruction set can be linked into another's code.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "zeroone/preconditioner.h"

namespace zeroone::formulas {

/// Lanes of a scale's sum, whatever the width of the registers.
inline constexpr std::int64_t kLanes = 16;

static inline float momentum(const StepScalars& s, float m, float g) { return s.beta1 * m + s.one_minus_beta1 * g; }

// What a coordinate with v = 0 keeps in the slot of m.
static inline float kept(float m, float g) { return g != 0 ? g : m; }

static inline float next_momentum(const StepScalars& s, float m, float g, float v) {
  return v > 0 ? momentum(s, m, g) : kept(m, g);
}

static inline float second_moment(const StepScalars& s, float v, float g) {
  return s.beta2 * v + s.one_minus_beta2 * (g * g);
}

// v after a refresh whose mean is z.
static inline float refreshed_moment(const StepScalars& s, float v, float z) {
  if (v > 0) return s.hold_born ? v : second_moment(s, v, z);
  const float own = s.birth_factor * (z * z);
  return z != 0 ? (own > s.birth_floor ? own : s.birth_floor) : 0.0f;
}

// m after it: before and after are v's.
static inline float refreshed_momentum(const StepScalars& s, float m, float z, float offered, float before,
                                       float after) {
  if (before > 0) return momentum(s, m, z);
  return after > 0 ? s.one_minus_beta1 * z : offered;
}

// step_size z / D, D = sqrt(v_hat) + eps; 0 where v = 0.
static inline float update(const StepScalars& s, float z, float v) {
  return v > 0 ? (s.step_size * z) / (std::sqrt(v * s.second_moment_correction) + s.eps) : 0.0f;
}

static inline float accumulate(float weight, float u, float m, float v) { return v > 0 ? u + weight * m : 0.0f; }

static inline float parameter(const StepScalars& s, float a, float z, float v) {
  return s.decay * a - update(s, z, v);
}

static inline float with_residual(float z, float rho, float residual, float support) {
  return support > 0 ? z + rho * residual : 0.0f;
}

static inline bool negative(float b) { return b < 0; }

static inline float decoded(const std::uint8_t* bits, std::int64_t i, float scale) {
  return (bits[i / 8] >> (i % 8)) & 1 ? -scale : scale;
}

static inline float reduce_lanes(float* lane) {
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

static inline bool finite(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7fffffffu) < 0x7f800000u; }

static inline float from_bfloat16(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

static inline std::uint16_t to_bfloat16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float from_float16(std::uint16_t x) {
  const std::uint32_t sign = std::uint32_t{x & 0x8000u} << 16;
  const std::uint32_t magnitude = x & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, or NaN made quiet
    const std::uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude < 0x0400u) {  // zero or subnormal: a multiple of 2^-24, exact in fp32
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

static inline std::uint16_t to_float16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // adding 0.5 leaves the multiple of 2^-24 in the last bits, rounded to nearest even
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  }
  return static_cast<std::uint16_t>(sign | half);
}

}  // namespace zeroone::formulas
