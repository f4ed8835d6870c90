// Kernels: raw pointers in, raw pointers out. One table per instruction set; all give the same bytes.
//
// docs/arithmetic.md fixes every operation; formulas.h is its scalar form. Pointers need no alignment, and must not
// overlap except where the same pointer is passed twice. Sign bits start at a byte.
#pragma once

#include <cstdint>

#include "zeroone/preconditioner.h"
#include "zeroone/types.h"

namespace zeroone {

struct Kernels {
  const char* name;
  int lanes;  // floats per vector register

  // Adam; a coordinate is born where v > 0, and keeps its last non-zero gradient in m before that.
  void (*adam_refresh)(const StepScalars& s, std::int64_t n, const float* g, float* m, float* v, float* a);
  bool (*adam_local_step)(const StepScalars& s, std::int64_t n, const float* g, float* m, float* m_before, float* u,
                          const float* a, const float* v, float* x, bool stream);
  void (*adam_offer)(std::int64_t n, const float* g, const float* m, const float* v, float* out);
  void (*adam_birth)(const StepScalars& s, std::int64_t n, const float* mean, const float* offered, float* m, float* v,
                     float* a);
  void (*adam_settle)(const StepScalars& s, std::int64_t n, const float* m, float* u, const float* v);
  bool (*adam_peek)(const StepScalars& s, std::int64_t n, const float* g, const float* m, const float* u,
                    const float* v, float* out);
  void (*adam_commit)(const StepScalars& s, std::int64_t n, const float* average, const float* g, float* m, float* u,
                      float* a, const float* v);
  void (*adam_parameter)(const StepScalars& s, std::int64_t n, const float* m, const float* u, const float* a,
                         const float* v, float* out);

  // Sign code. `encode` returns the sum over the piece of |b| (l1) or b^2 (l2), in lanes.
  float (*sign_encode)(std::int64_t n, const float* b, Scale scale, std::uint8_t* bits);
  void (*sign_decode)(std::int64_t n, const std::uint8_t* bits, float scale, const float* support, float* out);
  void (*sign_accumulate)(std::int64_t n, const std::uint8_t* bits, float scale, float* sum);

  // Vectors.
  void (*add)(std::int64_t n, const float* x, float* sum);                           // sum += x
  void (*subtract)(std::int64_t n, const float* x, const float* y, float* out);      // out = x - y
  void (*divide)(std::int64_t n, float divisor, float* x);                           // x /= divisor
  void (*add_residual)(std::int64_t n, const float* z, float rho, const float* residual, const float* support,
                       float* out);                                                  // out = born ? z + rho r : 0
  bool (*all_finite)(std::int64_t n, const float* x);
  float (*sum_born)(std::int64_t n, const float* v, std::int64_t* born);  // sum of v in lanes, and how many are > 0

  // Conversions; to 16 bits they round to nearest even.
  void (*bfloat16_to_float)(std::int64_t n, const std::uint16_t* x, float* out);
  void (*float_to_bfloat16)(std::int64_t n, const float* x, std::uint16_t* out);
  void (*float16_to_float)(std::int64_t n, const std::uint16_t* x, float* out);
  void (*float_to_float16)(std::int64_t n, const float* x, std::uint16_t* out);
};

/// The table of the instruction set in use (zeroone/instruction_set.h).
const Kernels& kernels();

extern const Kernels kScalarKernels;
#if defined(ZEROONE_HAVE_AVX2)
extern const Kernels kAvx2Kernels;
#endif
#if defined(ZEROONE_HAVE_AVX512)
extern const Kernels kAvx512Kernels;
#endif
#if defined(ZEROONE_HAVE_NEON)
extern const Kernels kNeonKernels;
#endif

}  // namespace zeroone
