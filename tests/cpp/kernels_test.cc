// Every kernel of every instruction set against the scalar twin, byte for byte: sizes, misalignments, special values.
#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/formulas.h"
#include "zeroone/error.h"
#include "zeroone/instruction_set.h"

namespace zeroone {
namespace {

constexpr std::int64_t kSizes[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 1023, 2047, 2048};

std::vector<const Kernels*> simd_tables() {
  std::vector<const Kernels*> tables;
  const std::string before(instruction_set());
  for (const std::string_view name : available_instruction_sets()) {
    if (name == "scalar") continue;
    select_instruction_set(name);
    tables.push_back(&kernels());
  }
  select_instruction_set(before);
  return tables;
}

class KernelsTest : public testing::TestWithParam<const Kernels*> {
 protected:
  // Values of all magnitudes, with zeros of both signs, subnormals and a few of the largest.
  std::vector<float> values(std::int64_t n, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) {
      switch (random() % 12) {
        case 0: v = 0.0f; break;
        case 1: v = -0.0f; break;
        case 2: v = normal(random) * 1e-39f; break;
        case 3: v = normal(random) * 1e18f; break;
        default: v = normal(random) * std::pow(10.0f, static_cast<float>(random() % 9) - 6);
      }
    }
    return x;
  }

  std::vector<float> second_moments(std::int64_t n, std::uint32_t seed) {
    std::vector<float> v = values(n, seed);
    for (float& x : v) x = std::fabs(x);
    return v;
  }

  static StepScalars scalars() {
    StepScalars s;
    s.beta1 = 0.9f;
    s.one_minus_beta1 = 0.1f;
    s.beta2 = 0.999f;
    s.one_minus_beta2 = 0.001f;
    s.eps = 1e-8f;
    s.second_moment_correction = 1.37f;
    s.momentum_weight = 3e-4f;
    s.lag = 2e-4f;
    s.step_size = 0.7f;
    s.decay = 0.993f;
    s.momentum_sum = 0.0123f;
    s.birth_factor = 0.31f;
    s.birth_floor = 0.02f;
    return s;
  }

  // Runs body(table, offset, n) -> bytes for both tables; they must be equal.
  template <typename Body>
  void expect_same_bytes(Body body) {
    for (const std::int64_t n : kSizes) {
      for (std::int64_t offset = 0; offset < 17; ++offset) {
        const std::vector<float> expected = body(kScalarKernels, offset, n);
        const std::vector<float> actual = body(*GetParam(), offset, n);
        ASSERT_EQ(expected.size(), actual.size());
        ASSERT_EQ(0, std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)))
            << GetParam()->name << " n=" << n << " offset=" << offset;
      }
    }
  }
};

// The whole buffers, so that a write beyond the end is seen, too.
std::vector<float> joined(std::initializer_list<std::vector<float>> buffers) {
  std::vector<float> all;
  for (const std::vector<float>& buffer : buffers) all.insert(all.end(), buffer.begin(), buffer.end());
  return all;
}

std::vector<float> as_floats(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<float> as_floats(const std::vector<std::uint16_t>& halves) { return {halves.begin(), halves.end()}; }

TEST_P(KernelsTest, AdamRefresh) {
  expect_same_bytes([&](const Kernels& k, std::int64_t o, std::int64_t n) {
    const auto g = values(n + o, 1);
    auto m = values(n + o + 16, 2), v = second_moments(n + o + 16, 3), a = values(n + o + 16, 4);
    k.adam_refresh(scalars(), n, g.data() + o, m.data() + o, v.data() + o, a.data() + o);
    return joined({m, v, a});
  });
}

TEST_P(KernelsTest, AdamBirth) {
  for (const bool hold_born : {false, true}) {
    expect_same_bytes([&](const Kernels& k, std::int64_t o, std::int64_t n) {
      const auto g = values(n + o, 1), mean = values(n + o, 5);
      auto m = values(n + o + 16, 2), v = second_moments(n + o + 16, 3), a = values(n + o + 16, 4);
      auto offered = values(n + o + 16, 6);
      k.adam_offer(n, g.data() + o, m.data() + o, v.data() + o, offered.data() + o);
      StepScalars s = scalars();
      s.hold_born = hold_born;
      k.adam_birth(s, n, mean.data() + o, offered.data() + o, m.data() + o, v.data() + o, a.data() + o);
      return joined({offered, m, v, a});
    });
  }
}

TEST_P(KernelsTest, AdamLocalStep) {
  for (const bool stream : {false, true}) {
    expect_same_bytes([&](const Kernels& k, std::int64_t o, std::int64_t n) {
      const auto g = values(n + o, 1), a = values(n + o, 2), v = second_moments(n + o, 3);
      auto m = values(n + o + 16, 4), u = values(n + o + 16, 5), x = values(n + o + 16, 6), before = x;
      EXPECT_TRUE(k.adam_local_step(scalars(), n, g.data() + o, m.data() + o, before.data() + o, u.data() + o,
                                    a.data() + o, v.data() + o, x.data() + o, stream));
      const auto old = values(n + o + 16, 4);
      EXPECT_EQ(0, std::memcmp(before.data() + o, old.data() + o, static_cast<std::size_t>(n) * sizeof(float)));
      return joined({m, before, u, x});
    });
  }
}

TEST_P(KernelsTest, AdamPeekIsTheLocalStepsAccumulation) {
  expect_same_bytes([&](const Kernels& k, std::int64_t o, std::int64_t n) {
    const auto g = values(n + o, 1), v = second_moments(n + o, 3), m = values(n + o, 4);
    const auto u = values(n + o, 5);
    auto out = values(n + o + 16, 6);
    const bool keeps =
        k.adam_peek(scalars(), n, g.data() + o, m.data() + o, u.data() + o, v.data() + o, out.data() + o);
    bool unborn = false;
    for (std::int64_t i = o; i < n + o; ++i) {
      const auto e = static_cast<std::size_t>(i);
      unborn = unborn || (v[e] == 0 && (g[e] != 0 || m[e] != 0));
    }
    EXPECT_EQ(keeps, unborn);
    auto m2 = m, u2 = u, x = m, before = m;
    StepScalars s = scalars();
    k.adam_local_step(s, n, g.data() + o, m2.data() + o, before.data() + o, u2.data() + o, m.data() + o, v.data() + o,
                      x.data() + o, false);
    s.lag = s.momentum_weight;
    k.adam_settle(s, n, m2.data() + o, u2.data() + o, v.data() + o);
    EXPECT_EQ(0, std::memcmp(out.data() + o, u2.data() + o, static_cast<std::size_t>(n) * sizeof(float)));
    return out;
  });
}

TEST_P(KernelsTest, AdamCommitAndParameter) {
  expect_same_bytes([&](const Kernels& k, std::int64_t o, std::int64_t n) {
    const auto average = values(n + o, 1), v = second_moments(n + o, 3), g = values(n + o, 8);
    auto m = values(n + o + 16, 4), u = values(n + o + 16, 5), a = values(n + o + 16, 6);
    auto x = values(n + o + 16, 7);
    k.adam_parameter(scalars(), n, m.data() + o, u.data() + o, a.data() + o, v.data() + o, x.data() + o);
    k.adam_commit(scalars(), n, average.data() + o, g.data() + o, m.data() + o, u.data() + o, a.data() + o, v.data() + o);
    return joined({m, u, a, x});
  });
}

TEST_P(KernelsTest, Sign) {
  for (const Scale scale : {Scale::kL1, Scale::kL2}) {
    expect_same_bytes([&](const Kernels& k, std::int64_t o, std::int64_t n) {
      const auto b = values(n + o, 1), support = second_moments(n + o, 3);
      std::vector<std::uint8_t> bits(static_cast<std::size_t>(n) / 8 + 4, 0xa5);
      auto all = values(n + o + 16, 4), born = all, sum = all;
      const float statistic = k.sign_encode(n, b.data() + o, scale, bits.data());
      k.sign_decode(n, bits.data(), 0.25f, nullptr, all.data() + o);
      k.sign_decode(n, bits.data(), 0.25f, support.data() + o, born.data() + o);
      k.sign_accumulate(n, bits.data(), 0.25f, sum.data() + o);
      for (std::int64_t i = 0; i < n; ++i) {
        EXPECT_EQ(all[static_cast<std::size_t>(i + o)], b[static_cast<std::size_t>(i + o)] < 0 ? -0.25f : 0.25f);
      }
      return joined({{statistic}, as_floats(bits), all, born, sum});
    });
  }
}

TEST_P(KernelsTest, SignStatisticIsTheSum) {
  const auto b = values(2048, 8);
  double l1 = 0, l2 = 0;
  for (const float x : b) {
    l1 += std::fabs(x);
    l2 += static_cast<double>(x) * x;
  }
  std::vector<std::uint8_t> bits(256);
  // 128 additions in a lane and 4 halvings: each rounds once.
  const double tolerance = 133 * std::ldexp(1.0, -24);
  EXPECT_NEAR(GetParam()->sign_encode(2048, b.data(), Scale::kL1, bits.data()), l1, l1 * tolerance);
  EXPECT_NEAR(GetParam()->sign_encode(2048, b.data(), Scale::kL2, bits.data()), l2, l2 * tolerance);
}

TEST_P(KernelsTest, Vectors) {
  expect_same_bytes([&](const Kernels& k, std::int64_t o, std::int64_t n) {
    const auto x = values(n + o, 1), y = values(n + o, 2), support = second_moments(n + o, 3);
    auto sum = values(n + o + 16, 4), difference = sum, quotient = sum, all = sum, born = sum;
    k.add(n, x.data() + o, sum.data() + o);
    k.subtract(n, x.data() + o, y.data() + o, difference.data() + o);
    k.divide(n, 3.0f, quotient.data() + o);
    k.add_residual(n, y.data() + o, 0.3f, x.data() + o, nullptr, all.data() + o);
    k.add_residual(n, born.data() + o, 0.3f, x.data() + o, support.data() + o, born.data() + o);
    std::int64_t count = -1;
    const float of_born = k.sum_born(n, support.data() + o, &count);
    return joined({sum, difference, quotient, all, born,
                   {of_born, static_cast<float>(count), static_cast<float>(k.all_finite(n, x.data() + o))}});
  });
}

TEST_P(KernelsTest, ALocalStepSeesEveryBadPosition) {
  for (const std::int64_t n : {1, 7, 16, 33, 100}) {
    const auto size = static_cast<std::size_t>(n);
    std::vector<float> g(size, 1.0f), m(size), before(size), u(size), a(size), v(size), x(size);
    for (const float bad : {INFINITY, NAN}) {
      for (std::size_t i = 0; i < size; ++i) {
        g[i] = bad;
        ASSERT_FALSE(GetParam()->adam_local_step(scalars(), n, g.data(), m.data(), before.data(), u.data(), a.data(),
                                                 v.data(), x.data(), false));
        g[i] = 1.0f;
      }
    }
  }
}

TEST_P(KernelsTest, AllFiniteSeesEveryPosition) {
  for (const std::int64_t n : kSizes) {
    std::vector<float> x(static_cast<std::size_t>(n), std::numeric_limits<float>::max());
    EXPECT_TRUE(GetParam()->all_finite(n, x.data()));
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      for (std::int64_t i = 0; i < n; ++i) {
        x[static_cast<std::size_t>(i)] = bad;
        ASSERT_FALSE(GetParam()->all_finite(n, x.data())) << n << " " << i << " " << bad;
        x[static_cast<std::size_t>(i)] = 0;
      }
    }
  }
}

TEST_P(KernelsTest, ConversionsFromEveryHalf) {
  std::vector<std::uint16_t> halves(1 << 16);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> expected(halves.size()), actual(halves.size());
  const auto n = static_cast<std::int64_t>(halves.size());
  kScalarKernels.bfloat16_to_float(n, halves.data(), expected.data());
  GetParam()->bfloat16_to_float(n, halves.data(), actual.data());
  EXPECT_EQ(0, std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)));
  kScalarKernels.float16_to_float(n, halves.data(), expected.data());
  GetParam()->float16_to_float(n, halves.data(), actual.data());
  for (std::size_t i = 0; i < halves.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(expected[i]), std::bit_cast<std::uint32_t>(actual[i])) << i;
    std::uint16_t back;
    kScalarKernels.float_to_float16(1, &expected[i], &back);
    if (std::isnan(expected[i])) continue;
    ASSERT_EQ(back, halves[i]);
  }
}

TEST_P(KernelsTest, ConversionsToHalvesRoundToNearestEven) {
  // All float16 and their midpoints, and the neighbours of both; then random bits.
  std::vector<float> x;
  for (std::uint32_t i = 0; i < 0x7c00; ++i) {
    const float low = formulas::from_float16(static_cast<std::uint16_t>(i));
    const float high = i + 1 == 0x7c00 ? 65536.0f : formulas::from_float16(static_cast<std::uint16_t>(i + 1));
    const float middle = static_cast<float>((static_cast<double>(low) + high) / 2);
    for (const float y : {low, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY)}) {
      x.push_back(y);
      x.push_back(-y);
    }
    std::uint16_t rounded;
    kScalarKernels.float_to_float16(1, &middle, &rounded);
    ASSERT_EQ(rounded, (i + 1) & ~1u) << "a tie goes to the even neighbour";
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const float y = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    x.push_back(std::isnan(y) ? 1.0f : y);
  }
  const auto n = static_cast<std::int64_t>(x.size());
  std::vector<std::uint16_t> expected(x.size()), actual(x.size());
  kScalarKernels.float_to_float16(n, x.data(), expected.data());
  GetParam()->float_to_float16(n, x.data(), actual.data());
  EXPECT_EQ(as_floats(expected), as_floats(actual));
  kScalarKernels.float_to_bfloat16(n, x.data(), expected.data());
  GetParam()->float_to_bfloat16(n, x.data(), actual.data());
  EXPECT_EQ(as_floats(expected), as_floats(actual));
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, KernelsTest, testing::ValuesIn(simd_tables()),
                         [](const auto& info) { return std::string(info.param->name); });
// On a processor without SIMD kernels there is nothing to compare.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KernelsTest);

TEST(InstructionSetTest, EachForcedSetIsTheOneThatRuns) {
  const std::string before(instruction_set());
  std::vector<int> lanes;
  for (const std::string_view name : available_instruction_sets()) {
    select_instruction_set(name);
    EXPECT_EQ(instruction_set(), name);
    // The number of lanes is a constant of the compiled kernels, not of the name; check_objects.sh looks at the registers
    // they use.
    const int expected = name == "avx512" ? 16 : name == "avx2" ? 8 : name == "neon" ? 4 : 1;
    EXPECT_EQ(instruction_set_lanes(), expected);
    lanes.push_back(instruction_set_lanes());
    float x[] = {-1.0f, 2.0f};
    std::uint8_t bits = 0;
    EXPECT_EQ(kernels().sign_encode(2, x, Scale::kL1, &bits), 3.0f);
    EXPECT_EQ(bits, 1);
  }
  EXPECT_TRUE(std::is_sorted(lanes.rbegin(), lanes.rend())) << "the best comes first";
  select_instruction_set(before);
}

TEST(InstructionSetTest, AnUnknownNameIsRefusedAndNamed) {
  const std::string before(instruction_set());
  try {
    select_instruction_set("mmx");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("'mmx'"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("scalar"), std::string::npos);
  }
  EXPECT_EQ(instruction_set(), before);
}

}  // namespace
}  // namespace zeroone
