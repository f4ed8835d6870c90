// Late coordinates: rows, and whole tensors, whose first gradient comes after v has settled must learn
// at the pace of their tensor, and must not explode.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "ranks.h"
#include "trial.h"
#include "zeroone/zeroone.h"

namespace zeroone::test {
namespace {

constexpr std::int64_t kRows = 24, kWidth = 8;
constexpr double kRate = 1e-3;

// A table of rows that each rank pulls towards a target of its own, 0.5 away, all with the mean 0.5;
// `uses(t, rank, row)` says which rows have a gradient.
class Table {
 public:
  template <typename Uses>
  Table(int world, Recipe recipe, std::int64_t steps, const Uses& uses) : path_(kRows) {
    ThreadGroup group(world, kPatience);
    run_ranks(group, world, [&](int rank) {
      ThreadCommunicator communicator(group, rank);
      std::vector<float> x(kRows * kWidth), gradient(kRows * kWidth);
      Engine engine(recipe, {{{"table", kRows * kWidth}}});
      const std::vector<Tensor> tensors{{x.data(), gradient.data()}};
      const std::vector<GroupOptions> options{{.lr = kRate, .weight_decay = 0}};
      engine.attach(communicator, tensors);
      for (std::int64_t t = 1; t <= steps; ++t) {
        for (std::int64_t i = 0; i < kRows * kWidth; ++i) {
          const auto e = static_cast<std::size_t>(i);
          const double target = 0.5 + 0.5 * noise(mix(static_cast<std::uint64_t>(t * 64 + rank)) +
                                                   static_cast<std::uint64_t>(i));
          gradient[e] = uses(t, rank, i / kWidth) ? x[e] - static_cast<float>(target) : 0.0F;
        }
        const std::vector<float> before = x;
        const StepKind kind = engine.step(communicator, tensors, options);
        if (rank == 0) note(before, x, kind);
      }
      engine.sync(communicator, tensors, options);
      if (rank == 0) final_ = x;
      finish(rank, x);
    });
  }

  /// Where the row is after step t, in the mean over its width.
  double at(std::int64_t row, std::int64_t t) const {
    return path_[static_cast<std::size_t>(row)][static_cast<std::size_t>(t - 1)];
  }
  /// The longest step of one coordinate of the row, in learning rates.
  double longest(std::int64_t row) const { return longest_[static_cast<std::size_t>(row)] / kRate; }
  const std::vector<float>& final() const { return final_; }
  std::int64_t refreshes() const { return refreshes_; }
  bool replicas_equal() const { return equal_; }

 private:
  void note(const std::vector<float>& before, const std::vector<float>& now, StepKind kind) {
    refreshes_ += kind == StepKind::kRefresh;
    longest_.resize(kRows);
    for (std::size_t row = 0; row < kRows; ++row) {
      double mean = 0;
      for (std::size_t i = row * kWidth; i < (row + 1) * kWidth; ++i) {
        mean += static_cast<double>(now[i]) / kWidth;
        longest_[row] = std::max(longest_[row], std::abs(static_cast<double>(now[i]) - static_cast<double>(before[i])));
      }
      path_[row].push_back(mean);
    }
  }
  void finish(int rank, const std::vector<float>& x) {
    const std::scoped_lock lock(mutex_);
    if (rank == 0 || other_.empty()) other_ = x;
    equal_ = equal_ && other_ == x;
  }

  std::vector<std::vector<double>> path_;
  std::vector<double> longest_;
  std::vector<float> final_, other_;
  std::int64_t refreshes_ = 0;
  bool equal_ = true;
  std::mutex mutex_;
};

class LateRows : public testing::TestWithParam<int> {};

// Row 23 is never used; rows 20 to 22 come late, row 22 on the last rank alone.
TEST_P(LateRows, AfterVIsHeldForGood) {
  const int world = GetParam();
  constexpr std::int64_t kLate = 150, kSteps = 600;
  const auto uses = [&](std::int64_t t, int rank, std::int64_t row) {
    return row < 20 || (row < 22 && t >= kLate) || (row == 22 && t >= kLate && rank == world - 1);
  };
  const Table table(world, zero_one_adam(doubling(4, 60), every_step()), kSteps, uses);
  EXPECT_TRUE(table.replicas_equal());
  const double pace = table.at(0, 300);
  EXPECT_GT(pace, 0.1);
  for (std::int64_t row = 20; row < 22; ++row) {
    EXPECT_EQ(table.at(row, kLate - 1), 0);
    // It is born at most a gap of the schedule (8 at step 150, kappa 4) after its first gradient.
    EXPECT_GT(table.at(row, kLate + 300), 0.7 * pace) << "row " << row;
    EXPECT_LT(table.at(row, kLate + 300), 1.3 * pace) << "row " << row;
    EXPECT_LT(table.longest(row), 5) << "row " << row;
  }
  EXPECT_GT(table.at(22, kSteps), 0.2 * pace);
  EXPECT_LT(table.longest(22), 5);
  for (std::size_t i = 23 * kWidth; i < 24 * kWidth; ++i) EXPECT_EQ(table.final()[i], 0);
}

TEST_P(LateRows, LongAfterTheStartBetweenRareRefreshes) {
  const int world = GetParam();
  constexpr std::int64_t kLate = 3000, kSteps = 3400;
  const auto uses = [&](std::int64_t t, int, std::int64_t row) { return row < 20 || t >= kLate; };
  const Table table(world, zero_one_adam(doubling(32), every_step()), kSteps, uses);
  EXPECT_TRUE(table.replicas_equal());
  for (std::int64_t row = 20; row < kRows; ++row) {
    EXPECT_GT(table.at(row, kSteps), 0.7 * table.at(0, 300)) << "row " << row;
    EXPECT_LT(table.longest(row), 5) << "row " << row;
  }
}

// No coordinate of the tensor was born before, so there is no floor: its own first gradients decide. With one
// gradient in ten v starts from one gradient squared, ten times the mean of its square, and forgets it slowly: half the
// pace of such a tensor that is there from the start.
TEST_P(LateRows, AWholeTensor) {
  const int world = GetParam();
  constexpr std::int64_t kLate = 200, kSteps = 700;
  for (const bool rare : {false, true}) {  // one gradient in ten
    const auto from = [&](std::int64_t start) {
      return Table(world, zero_one_adam(doubling(16), every_step()), kSteps,
                   [=](std::int64_t t, int rank, std::int64_t row) {
                     if (row == 0) return t == 1;  // the first refresh needs a gradient
                     const std::uint64_t draw = mix(static_cast<std::uint64_t>(t * 640 + row * 20 + rank));
                     return t >= start && (!rare || draw % 10 == 0);
                   });
    };
    const Table early = from(1), late = from(kLate);
    EXPECT_TRUE(late.replicas_equal());
    double pace = 0, reference = 0;
    for (std::int64_t row = 1; row < kRows; ++row) {
      pace += late.at(row, kSteps) / (kRows - 1);
      reference += early.at(row, kSteps - kLate) / (kRows - 1);
      EXPECT_LT(late.longest(row), rare ? 3 : 8) << "row " << row << ", rare " << rare;
    }
    EXPECT_GT(pace, (rare ? 0.4 : 0.9) * reference) << "rare " << rare;
  }
}

// After `until` nothing is exchanged densely unless there is something to be born.
TEST_P(LateRows, CostNothingWhereThereAreNone) {
  const auto all = [](std::int64_t, int, std::int64_t) { return true; };
  const Table table(GetParam(), zero_one_adam(doubling(2, 10), every_step()), 200, all);
  const Table late(GetParam(), zero_one_adam(doubling(2, 10), every_step()), 200,
                   [](std::int64_t t, int, std::int64_t row) { return row > 0 || t >= 50; });
  const std::int64_t before = table.refreshes();
  EXPECT_EQ(before, 5);  // 1, 2, 3, 5, 7; 11 comes after `until`
  EXPECT_EQ(late.refreshes(), before + 1);
}

// 1-bit Adam's points after the warm-up are those of a schedule that doubles.
TEST_P(LateRows, OfOneBitAdam) {
  constexpr std::int64_t kLate = 150;
  const Table table(GetParam(), one_bit_adam(60), 500,
                    [](std::int64_t t, int, std::int64_t row) { return row < 20 || t >= kLate; });
  EXPECT_EQ(table.refreshes(), 61);
  EXPECT_GT(table.at(20, 450), 0.7 * table.at(0, 300));
  EXPECT_LT(table.longest(20), 5);
}

INSTANTIATE_TEST_SUITE_P(Births, LateRows, testing::Values(1, 2, 3, 5, 8));

// What the ranks keep may cancel in the mean: such a coordinate stays unborn and goes on offering.
TEST(Births, AMeanOfZeroGivesNoBirth) {
  ThreadGroup group(2, kPatience);
  run_ranks(group, 2, [&](int rank) {
    ThreadCommunicator communicator(group, rank);
    std::vector<float> x(2), gradient(2);
    Engine engine(zero_one_adam(every_step(), every_step()), {{{"x", 2}}});
    const std::vector<Tensor> tensors{{x.data(), gradient.data()}};
    const std::vector<GroupOptions> options{{.lr = 0.1, .weight_decay = 0}};
    engine.attach(communicator, tensors);
    gradient = {1, rank == 0 ? 3.0F : -3.0F};
    engine.step(communicator, tensors, options);
    EXPECT_EQ(engine.vector("exp_avg_sq", 0)[1], 0);
    EXPECT_EQ(engine.vector("exp_avg", 0)[1], rank == 0 ? 3.0F : -3.0F);
    EXPECT_EQ(x[1], 0);
    gradient = {1, rank == 0 ? 2.0F : 0.0F};  // rank 1 still offers -3
    engine.step(communicator, tensors, options);
    const auto k2 = static_cast<float>(1 - 0.999 * 0.999);
    EXPECT_EQ(engine.vector("exp_avg_sq", 0)[1],
              std::max(k2 * 0.25F, 0.001F));  // the floor: v of the other coordinate
    EXPECT_EQ(engine.vector("exp_avg", 0)[1], static_cast<float>(1 - 0.9) * -0.5F);
  });
}

}  // namespace
}  // namespace zeroone::test
