// Dense exchanges in 16 bits: half the bytes, the mean still taken in fp32.
#include <gtest/gtest.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "trial.h"
#include "zeroone/zeroone.h"

namespace zeroone::test {
namespace {

class DenseWire : public testing::TestWithParam<std::tuple<DType, int>> {};

TEST_P(DenseWire, EveryByteAgrees) {
  const auto [wire, world] = GetParam();
  for (const bool zero_one : {true, false}) {
    PlainRecipe recipe{plain_doubling(2, 40), plain_interval(3), Scale::kL1, true, false};
    if (!zero_one) recipe = plain_adamw();
    recipe.dense = wire;
    Trial trial({.recipe = recipe, .groups = {{70, 0, 2500}, {11}}, .world = world, .threads = 2});
    for (std::int64_t t = 1; t <= 30; ++t) {
      std::vector<GroupOptions> o{{.lr = 1e-3, .weight_decay = 0.1}, {.lr = 2e-3, .maximize = true}};
      trial.step(t, o);
      if (HasFailure()) return;
    }
    trial.expect_accounts();
  }
}

INSTANTIATE_TEST_SUITE_P(Dense, DenseWire,
                         testing::Combine(testing::Values(DType::kBFloat16, DType::kFloat16),
                                          testing::Values(1, 2, 3, 8)));

TEST(DenseWire, TheMeanOfLargeValuesDoesNotOverflow) {
  constexpr int kWorld = 8;
  ThreadGroup group(kWorld, kPatience);
  run_ranks(group, kWorld, [&](int rank) {
    ThreadCommunicator communicator(group, rank);
    std::vector<float> x(100), gradient(100, 30'000.0F);
    Engine engine(adamw(true, half_code(DType::kFloat16)), {{{"x", 100}}});
    const std::vector<Tensor> tensors{{x.data(), gradient.data()}};
    const std::vector<GroupOptions> options{{.beta1 = 0}};
    engine.attach(communicator, tensors);
    EXPECT_EQ(engine.step(communicator, tensors, options), StepKind::kRefresh);
    EXPECT_EQ(engine.vector("exp_avg", 0)[77], 30'000.0F);
    // What fp16 can't carry makes the rank count as zero.
    if (rank == 3) gradient[5] = 70'000.0F;
    engine.step(communicator, tensors, options);
    EXPECT_EQ(engine.vector("exp_avg", 0)[77], 26'256.0F);  // 26250, nearest in fp16
    EXPECT_EQ(engine.stats().nonfinite_gradients, rank == 3 ? 1 : 0);
  });
}

}  // namespace
}  // namespace zeroone::test
