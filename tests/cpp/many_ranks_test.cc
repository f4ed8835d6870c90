// 128 ranks in one process: the paper's largest number of workers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ranks.h"
#include "trial.h"
#include "zeroone/zeroone.h"

namespace zeroone::test {
namespace {

std::uint64_t hash(const float* values, std::size_t n) {
  std::uint64_t h = n;
  for (std::size_t i = 0; i < n; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    h = (h ^ bits) * 0x100000001b3;
  }
  return h;
}

struct Round {
  std::int64_t step;
  StepKind kind;
  std::uint64_t anchor, second_moment, momentum, parameters;

  friend bool operator==(const Round&, const Round&) = default;
};

TEST(ManyRanks, StayEqualAtEveryRound) {
  constexpr int kWorld = 128;
  constexpr std::int64_t kSteps = 200;
  const char* large = std::getenv("ZEROONE_TEST_LARGE");
  const std::size_t n = large != nullptr && std::strcmp(large, "1") == 0 ? 1'000'000 : 100'000;
  // A rank's gradient in a step is a window of one long noise, so that it costs nothing to draw.
  std::vector<float> noises(n + 65'536);
  for (std::size_t i = 0; i < noises.size(); ++i) noises[i] = noise(i);
  const auto large_tensor = static_cast<std::int64_t>(n - 3007);

  ThreadGroup group(kWorld, kPatience);
  std::vector<std::vector<Round>> rounds(kWorld);
  std::vector<std::int64_t> bytes(kWorld);
  run_ranks(group, kWorld, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    ThreadCommunicator communicator(group, rank);
    Engine engine(zero_one_adam(doubling(4), learning_rate_tied(16)),
                  {{{"large", large_tensor}, {"small", 7}}, {{"other", 3000}}});
    std::vector<float> x(n, static_cast<float>(rank));
    std::vector<Tensor> tensors(3);
    tensors[0].data = x.data();
    tensors[1].data = x.data() + large_tensor;
    tensors[2].data = x.data() + large_tensor + 7;
    engine.attach(communicator, tensors);
    std::vector<GroupOptions> options(2);
    for (std::int64_t t = 1; t <= kSteps; ++t) {
      const float* gradient =
          noises.data() + mix(static_cast<std::uint64_t>(t) * kWorld + r) % 65'536;
      tensors[0].gradient = gradient;
      tensors[1].gradient = gradient + large_tensor;
      tensors[2].gradient = gradient + large_tensor + 7;
      options[0].lr = 1e-3 * std::pow(0.98, static_cast<double>(t));
      options[1].lr = options[0].lr / 2;
      const StepKind kind = engine.step(communicator, tensors, options);
      if (kind == StepKind::kLocal) continue;
      Round round{t, kind, 0, 0, 0, hash(x.data(), n)};
      for (const auto& [g, size] : {std::pair{0, n - 3000}, std::pair{1, std::size_t{3000}}}) {
        round.anchor = mix(round.anchor + hash(engine.vector("anchor", g), size));
        round.second_moment = mix(round.second_moment + hash(engine.vector("exp_avg_sq", g), size));
        round.momentum = mix(round.momentum + hash(engine.vector("exp_avg", g), size));
      }
      rounds[r].push_back(round);
    }
    bytes[r] = engine.stats().bytes_sent;
  });

  for (std::size_t r = 1; r < kWorld; ++r) {
    EXPECT_TRUE(rounds[r] == rounds[0]) << "rank " << r;
    EXPECT_EQ(bytes[r], bytes[0]);
  }
  const auto count = [&](StepKind kind) {
    return std::count_if(rounds[0].begin(), rounds[0].end(),
                         [&](const Round& x) { return x.kind == kind; });
  };
  EXPECT_GT(count(StepKind::kRefresh), 10);
  EXPECT_GT(count(StepKind::kSync), 20);
  EXPECT_GT(kSteps - std::ssize(rounds[0]), 50);  // local steps
  // The state moved, and v changed at refreshes only.
  for (std::size_t i = 1; i < rounds[0].size(); ++i) {
    EXPECT_NE(rounds[0][i].anchor, rounds[0][i - 1].anchor);
    EXPECT_NE(rounds[0][i].momentum, rounds[0][i - 1].momentum);
    EXPECT_EQ(rounds[0][i].second_moment != rounds[0][i - 1].second_moment,
              rounds[0][i].kind == StepKind::kRefresh);
  }
}

}  // namespace
}  // namespace zeroone::test
