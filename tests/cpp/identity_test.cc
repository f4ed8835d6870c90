// The identities that a right implementation satisfies: algebra in double on the twin, norm-wise on
// the library, and bytes where the arithmetic is the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plain_twin.h"
#include "plans.h"
#include "trial.h"

namespace zeroone::test {
namespace {

using Doubles = std::vector<double>;

double norm(const Doubles& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

Doubles difference(Doubles x, const Doubles& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] -= y[i];
  return x;
}

Doubles widen(const std::vector<float>& x) {
  return {x.begin(), x.end()};
}

// E = mean_i worker_error_i + concat_j server_error_j, from the library's vectors.
Doubles library_residual(Trial& trial, std::size_t g) {
  const Layout& layout = trial.twin().slab(g).layout;
  Doubles e(static_cast<std::size_t>(layout.numel));
  for (int r = 0; r < trial.world(); ++r) {
    const std::vector<float> worker = trial.vector(r, "worker_error", g);
    for (std::size_t i = 0; i < e.size(); ++i)
      e[i] += static_cast<double>(worker[i]) / trial.world();
    const std::size_t own = trial.own_chunk(g, static_cast<std::size_t>(r)).size();
    const float* server =
        trial.rank(r).engine->vector("server_error", static_cast<std::int64_t>(g));
    for (std::size_t i = 0; i < own; ++i)
      e[static_cast<std::size_t>(r * layout.chunk) + i] += server[i];
  }
  return e;
}

// mean_i of the u that the next local step leaves, in double, from the library's vectors and the
// gradients in `trial`.
Doubles mean_next_u(Trial& trial, std::size_t g, const GroupOptions& options, double step_size) {
  const std::vector<float> v = trial.vector(0, "exp_avg_sq", g);
  Doubles mean(v.size());
  for (int r = 0; r < trial.world(); ++r) {
    const std::vector<float> m = trial.vector(r, "exp_avg", g),
                             u = trial.vector(r, "accumulated", g);
    const std::vector<float>& gradient = trial.gradients()[static_cast<std::size_t>(r)][g];
    for (std::size_t i = 0; i < v.size(); ++i) {
      const double next_m =
          options.beta1 * m[i] + (1 - options.beta1) * (options.maximize ? -1 : 1) * gradient[i];
      const double next_u = options.lr == 0 ? u[i] : u[i] + step_size * next_m;
      mean[i] += v[i] > 0 ? next_u / trial.world() : 0;
    }
  }
  return mean;
}

double bias_corrected(double lr, double beta1, std::int64_t t) {
  return lr / (1 - std::pow(beta1, static_cast<double>(t)));
}

// 1. Conservation: u_bar + E_new = mean_i u_i + rho E_old.

TEST(Conservation, OfTheTwinInDouble) {
  for (const int world : {1, 2, 3, 5, 8}) {
    const Layout layout({100, 0, 37, 5}, world);
    std::vector<char> born(142, 1);
    for (std::size_t i = 3; i < born.size(); i += 7) born[i] = 0;
    std::vector<Doubles> worker_error(static_cast<std::size_t>(world), Doubles(142));
    Doubles server_error(142);
    for (int round = 0; round < 30; ++round) {
      const double rho = round % 3 == 0 ? 0.25 : 1;
      std::vector<Doubles> z = worker_error;
      Doubles expected(142);
      for (std::size_t r = 0; r < z.size(); ++r) {
        for (std::size_t i = 0; i < 142; ++i) {
          z[r][i] = born[i] != 0 ? noise(mix(static_cast<std::uint64_t>(round)) + 1000 * r + i) : 0;
          expected[i] += (z[r][i] + rho * worker_error[r][i]) / world;
        }
      }
      for (std::size_t i = 0; i < 142; ++i) expected[i] += rho * server_error[i];
      Doubles actual = one_bit_mean(layout, born, Scale::kL1, rho, z, worker_error, server_error);
      for (std::size_t i = 0; i < 142; ++i) {
        actual[i] += server_error[i];
        for (const Doubles& error : worker_error) actual[i] += error[i] / world;
      }
      EXPECT_LT(norm(difference(actual, expected)), 1e-13 * norm(expected));
    }
  }
}

class Conservation : public testing::TestWithParam<std::tuple<int, Scale>> {};

TEST_P(Conservation, OfTheLibrary) {
  const auto [world, scale] = GetParam();
  Trial trial({.recipe = {plain_doubling(3), plain_interval(3), scale, true, false},
               .groups = {{700, 0, 301}, {65}},
               .world = world});
  double smallest_rho = 1;
  for (std::int64_t t = 1; t <= 60; ++t) {
    const std::vector<GroupOptions> o = options(Plan::kDrop, t, 2);
    trial.draw(t);
    std::vector<Doubles> u, old_residual;
    Doubles rho, sum, size;
    for (std::size_t g = 0; g < 2; ++g) {
      const SlabCounters& c = trial.rank(0).engine->counters().slabs[g];
      const double step_size = bias_corrected(o[g].lr, o[g].beta1, t);
      u.push_back(mean_next_u(trial, g, o[g], step_size));
      old_residual.push_back(library_residual(trial, g));
      sum.push_back(c.sum + step_size);
      rho.push_back(c.previous_sum > 0 ? std::min(1.0, sum[g] / c.previous_sum) : 1);
      // The size of what was rounded.
      size.push_back(norm(u[g]));
      for (int r = 0; r < world; ++r)
        size[g] += norm(widen(trial.vector(r, "worker_error", g))) / world;
    }
    if (trial.step(t, o) != StepKind::kSync) continue;
    for (std::size_t g = 0; g < 2; ++g) {
      Doubles left = library_residual(trial, g), right = u[g];
      const std::vector<float> m = trial.vector(0, "exp_avg", g),
                               v = trial.vector(0, "exp_avg_sq", g);
      for (std::size_t i = 0; i < left.size(); ++i) {
        if (v[i] > 0) left[i] += sum[g] * m[i];  // u_bar = S m
        right[i] += rho[g] * old_residual[g][i];
      }
      EXPECT_LT(norm(difference(left, right)), 3e-7 * size[g]) << "group " << g << ", step " << t;
      smallest_rho = std::min(smallest_rho, rho[g]);
    }
  }
  EXPECT_GT(trial.count(StepKind::kSync), 10);
  EXPECT_LT(smallest_rho, 0.01);
}

INSTANTIATE_TEST_SUITE_P(Identity, Conservation,
                         testing::Combine(testing::Values(1, 2, 3, 8),
                                          testing::Values(Scale::kL1, Scale::kL2)));

// 2. The virtual iterate y = x - E / D moves by -mean_i u_i / D per interval.

GroupOptions plain_options(double lr) {
  return {.lr = lr, .weight_decay = 0};
}

TEST(VirtualIterate, OfTheTwinInDouble) {
  const std::vector<GroupOptions> o{plain_options(1e-2)};
  Twin<double> twin({plain_every_step(4), plain_interval(5), Scale::kL1, false, false}, {{90, 33}},
                    3, {Doubles(123)});
  const auto iterate = [&] {
    Doubles y = twin.residual(0);
    for (std::size_t i = 0; i < y.size(); ++i)
      y[i] = twin.slab(0).a[i] - y[i] / twin.denominator(0, i, o[0]);
    return y;
  };
  const auto draw = [](std::int64_t t) {
    Twin<double>::Gradients gradients(3, {Doubles(123)});
    for (std::size_t r = 0; r < 3; ++r) {
      for (std::size_t i = 0; i < 123; ++i) {
        gradients[r][0][i] =
            noise(i) + 2 * noise(mix(static_cast<std::uint64_t>(t)) + 1000 * r + i);
      }
    }
    return gradients;
  };
  int syncs = 0;
  for (std::int64_t t = 1; t <= 100; ++t) {
    const Doubles before = iterate();
    const Twin<double>::Gradients gradients = draw(t);
    Doubles expected = before;
    for (std::size_t r = 0; r < 3; ++r) {
      for (std::size_t i = 0; i < 123; ++i) {
        const double m = 0.9 * twin.slab(0).m[r][i] + (1 - 0.9) * gradients[r][0][i];
        expected[i] -= (twin.slab(0).u[r][i] + 1e-2 * m) / 3 / twin.denominator(0, i, o[0]);
      }
    }
    if (twin.step(gradients, o) != StepKind::kSync) continue;
    ++syncs;
    EXPECT_LT(norm(difference(iterate(), expected)), 1e-12 * norm(difference(expected, before)));
  }
  EXPECT_GE(syncs, 19);
}

TEST(VirtualIterate, OfTheLibrary) {
  const std::vector<GroupOptions> o{plain_options(1e-2)};
  Trial trial({.recipe = {plain_every_step(4), plain_interval(5), Scale::kL1, false, false},
               .groups = {{90, 33}},
               .world = 4,
               .holes = false});
  const auto iterate = [&] {
    Doubles y = library_residual(trial, 0);
    const std::vector<float> v = trial.vector(0, "exp_avg_sq", 0), a = trial.vector(0, "anchor", 0);
    for (std::size_t i = 0; i < y.size(); ++i)
      y[i] = a[i] - y[i] / (std::sqrt(double{v[i]}) + o[0].eps);
    return y;
  };
  for (std::int64_t t = 1; t <= 100; ++t) {
    trial.draw(t);
    const Doubles before = iterate();
    Doubles move = mean_next_u(trial, 0, o[0], o[0].lr);
    const std::vector<float> v = trial.vector(0, "exp_avg_sq", 0);
    if (trial.step(t, o) != StepKind::kSync) continue;
    for (std::size_t i = 0; i < move.size(); ++i) move[i] /= std::sqrt(double{v[i]}) + o[0].eps;
    const Doubles moved = difference(before, iterate());
    EXPECT_LT(norm(difference(moved, move)), 1e-5 * norm(move)) << "step " << t;
  }
  EXPECT_GE(trial.count(StepKind::kSync), 19);
}

// 3 and 4. A refresh in every step is AdamW on the mean gradient, 1711.05101, as torch.optim.AdamW
// computes it.

struct PlainAdamW {
  Doubles p, m, v;
  int t = 0;

  explicit PlainAdamW(Doubles initial) : p(std::move(initial)), m(p.size()), v(p.size()) {}

  void step(const Doubles& g, const GroupOptions& o) {
    ++t;
    for (std::size_t i = 0; i < p.size(); ++i) {
      p[i] *= 1 - o.lr * o.weight_decay;
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g[i];
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g[i] * g[i];
      const double denominator = std::sqrt(v[i]) / std::sqrt(1 - std::pow(o.beta2, t)) + o.eps;
      p[i] -= o.lr / (1 - std::pow(o.beta1, t)) * m[i] / denominator;
    }
  }
};

class RefreshEveryStep : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(RefreshEveryStep, IsAdamW) {
  const auto [world, named] = GetParam();
  const PlainRecipe recipe =
      named ? plain_adamw()
            : PlainRecipe{plain_every_step(), plain_interval(4), Scale::kL1, true, false};
  Trial trial({.recipe = recipe, .groups = {{1000, 37}}, .world = world, .holes = false});
  const Doubles initial = widen(trial.vector(0, "anchor", 0));
  PlainAdamW reference(initial);
  Twin<double> twin(recipe, {{1000, 37}}, world, {initial});
  for (std::int64_t t = 1; t <= 60; ++t) {
    const std::vector<GroupOptions> o = options(Plan::kRestarts, t, 1);
    ASSERT_EQ(trial.step(t, o), StepKind::kRefresh);
    Twin<double>::Gradients gradients;
    Doubles mean(initial.size());
    for (const auto& of_rank : trial.gradients()) {
      gradients.push_back({widen(of_rank[0])});
      for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += gradients.back()[0][i] / world;
    }
    ASSERT_TRUE(std::none_of(mean.begin(), mean.end(), [](double g) { return g == 0; }));
    twin.step(gradients, o);
    reference.step(mean, o[0]);
    const double way = norm(difference(reference.p, initial));
    EXPECT_LT(norm(difference(twin.slab(0).a, reference.p)), 1e-12 * way);
    EXPECT_LT(norm(difference(widen(trial.vector(0, "anchor", 0)), reference.p)), 1e-5 * way)
        << "step " << t;
    EXPECT_LT(norm(difference(widen(trial.vector(0, "exp_avg", 0)), reference.m)),
              1e-6 * norm(reference.m));
    EXPECT_LT(norm(difference(widen(trial.vector(0, "exp_avg_sq", 0)), reference.v)),
              1e-6 * norm(reference.v));
  }
}

INSTANTIATE_TEST_SUITE_P(Identity, RefreshEveryStep,
                         testing::Combine(testing::Values(1, 3, 8), testing::Bool()));

// 5. From the same state, with v held, a sync in every step, a learning rate that is a power of two
// and no bias correction, 0/1 Adam is 1-bit Adam: scaling by a power of two rounds nothing.
TEST(SyncEveryStep, IsOneBitAdam) {
  for (const int world : {1, 2, 5}) {
    const std::vector<GroupOptions> o{{.lr = 0x1p-10, .weight_decay = 0.1}};
    const Problem one_bit{.recipe = plain_one_bit_adam(5, Scale::kL1, false),
                          .groups = {{300, 0, 77}},
                          .world = world};
    Problem zero_one = one_bit;
    zero_one.recipe = {plain_every_step(5), plain_interval(1), Scale::kL1, false, false};
    Trial left(zero_one), right(one_bit);
    for (std::int64_t t = 1; t <= 60; ++t) {
      ASSERT_EQ(left.step(t, o), right.step(t, o));
      for (int r = 0; r < world; ++r) {
        for (const char* name : {"anchor", "exp_avg", "exp_avg_sq", "accumulated"}) {
          EXPECT_EQ(left.vector(r, name, 0), right.vector(r, name, 0)) << name << ", step " << t;
        }
        EXPECT_EQ(left.rank(r).parameters, right.rank(r).parameters) << "step " << t;
        std::vector<float> scaled = right.vector(r, "worker_error", 0);
        for (float& x : scaled) x *= 0x1p-10F;
        EXPECT_EQ(left.vector(r, "worker_error", 0), scaled) << "step " << t;
      }
    }
    EXPECT_GT(left.count(StepKind::kSync), 50);
  }
}

// 6. Anchor and v are the same bytes on all ranks (the twin has each but once) for thousands of
// steps.
class Replicas : public testing::TestWithParam<std::tuple<DType, Scale>> {};

TEST_P(Replicas, StayEqual) {
  const auto [dtype, scale] = GetParam();
  Trial trial({.recipe = {plain_doubling(16), plain_tied(16), scale, true, false},
               .groups = {{37, 0, 64}, {5}},
               .world = 4,
               .dtype = dtype,
               .gradient_dtype = dtype});
  for (std::int64_t t = 1; t <= 2500; ++t) {
    std::vector<GroupOptions> o = options(Plan::kZeros, t, 2);
    for (GroupOptions& group : o) group.lr *= std::pow(0.5, static_cast<double>(t % 800) / 150);
    trial.step(t, o);
    if (HasFailure()) return;
  }
  EXPECT_GT(trial.count(StepKind::kLocal), 700);
  EXPECT_GT(trial.count(StepKind::kSync), 300);
  EXPECT_GT(trial.count(StepKind::kRefresh), 60);
  trial.expect_accounts();
}

INSTANTIATE_TEST_SUITE_P(Identity, Replicas,
                         testing::Combine(testing::Values(DType::kFloat32, DType::kBFloat16,
                                                          DType::kFloat16),
                                          testing::Values(Scale::kL1, Scale::kL2)));

// 7. A constant u on all ranks: the running mean of u_bar tends to the mean u on born coordinates,
// and is 0 elsewhere. With beta1 = 0 and a constant learning rate u is lr g, and a sync leaves
// u_bar / S in m.
TEST(ConstantUpdate, IsTransmittedInTheMean) {
  for (const Scale scale : {Scale::kL1, Scale::kL2}) {
    const std::vector<GroupOptions> o{{.lr = 1e-3, .beta1 = 0, .weight_decay = 0}};
    Trial trial({.recipe = {plain_every_step(3), plain_interval(1), scale, false, false},
                 .groups = {{200, 41}},
                 .world = 3});
    for (std::int64_t t = 1; t <= 3; ++t) ASSERT_EQ(trial.step(1, o), StepKind::kRefresh);
    ASSERT_EQ(trial.step(7, o), StepKind::kSync);
    ASSERT_EQ(trial.step(7, o), StepKind::kRefresh);  // births
    const std::vector<float> v = trial.vector(0, "exp_avg_sq", 0);
    Doubles sum(v.size());
    double early = 0, late = 0;
    for (int t = 1; t <= 400; ++t) {
      ASSERT_EQ(trial.step(7, o), StepKind::kSync);
      const std::vector<float> m = trial.vector(0, "exp_avg", 0);
      Doubles error(v.size());
      for (std::size_t i = 0; i < v.size(); ++i) {
        sum[i] += m[i];
        double mean = 0;
        for (const auto& of_rank : trial.gradients()) mean += of_rank[0][i] / 3.0;
        error[i] = sum[i] / t - (v[i] > 0 ? mean : 0);
        if (v[i] == 0) {
          EXPECT_EQ(sum[i], 0);
        }
      }
      if (t == 40) early = norm(error);
      if (t == 400) late = norm(error);
    }
    // The error is what the residuals hold, divided by the number of rounds.
    EXPECT_GT(early, 0);
    EXPECT_LT(late, early / 5);
  }
}

// 8. Gaps and golden lists.

std::vector<std::int64_t> golden_refreshes() {
  std::vector<std::int64_t> steps;
  for (std::int64_t t = 1; t <= 17; ++t) steps.push_back(t);
  for (std::int64_t t = 19; t <= 49; t += 2) steps.push_back(t);
  for (std::int64_t t = 53; t <= 60; t += 4) steps.push_back(t);
  return steps;
}

TEST(Schedules, GoldenRefreshesOfTheDefaultRecipe) {
  const std::vector<GroupOptions> o{GroupOptions{}};
  std::vector<float> x(9, 1), gradient(9, 1);
  const std::vector<Tensor> tensors{{.data = x.data(), .gradient = gradient.data()}};
  LocalCommunicator communicator;
  Engine engine(zero_one_adam(), {{{"x", 9}}});
  engine.attach(communicator, tensors);
  std::vector<std::int64_t> refreshes;
  for (std::int64_t t = 1; t <= 60; ++t) {
    const StepKind kind = engine.step(communicator, tensors, o);
    EXPECT_NE(kind, StepKind::kLocal);  // a constant learning rate stays at interval 1
    if (kind == StepKind::kRefresh) refreshes.push_back(t);
  }
  EXPECT_EQ(refreshes, golden_refreshes());
}

// Steps of the events of `schedule` under `lr`, each taking place as soon as it is due.
std::vector<std::int64_t> events(const Schedule& schedule, const std::vector<double>& lr) {
  ScheduleState state;
  std::vector<std::int64_t> result;
  for (std::int64_t t = 1; t <= std::ssize(lr); ++t) {
    const std::vector<double> now{lr[static_cast<std::size_t>(t - 1)]};
    Schedule::observe(state, now);
    if (!schedule.due(state, t)) continue;
    result.push_back(t);
    schedule.advance(state, t, now);
  }
  return result;
}

TEST(Schedules, GoldenLists) {
  using List = std::vector<std::int64_t>;
  const std::vector<double> constant(60, 1.0);
  EXPECT_EQ(events(*doubling(16), constant), golden_refreshes());
  EXPECT_EQ(events(*doubling(1), constant), (List{1, 2, 4, 8, 16, 32}));
  EXPECT_EQ(events(*doubling(1, 16), constant), (List{1, 2, 4, 8, 16}));
  EXPECT_EQ(events(*doubling(1, 15), constant), (List{1, 2, 4, 8}));
  EXPECT_EQ(events(*every_step(3), constant), (List{1, 2, 3}));
  EXPECT_EQ(events(*interval(25), constant), (List{1, 26, 51}));
  EXPECT_EQ(events(*steps({2, 3, 59}), constant), (List{2, 3, 59}));
  // Refreshes in the 12,500 steps of the paper's BERT warm-up: zero_one_adam.md, section 5.
  EXPECT_EQ(events(*doubling(16), std::vector<double>(12'500, 1.0)).size(), 153U);
  const std::vector<double> lr{1,    0.6, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25,  // steps 1 to 8
                               0.25, 0.3, 0.3, 0.3, 0.3, 0,    0,    0};    // steps 9 to 16
  EXPECT_EQ(events(*learning_rate_tied(16), lr), (List{1, 2, 3, 5, 7, 11, 12, 14}));
  EXPECT_EQ(events(*learning_rate_tied(3), lr), (List{1, 2, 3, 5, 7, 10, 11, 13, 15}));
}

TEST(Schedules, AgreeWithThePlainOnes) {
  const std::vector<PlainSchedule> all{plain_every_step(),     plain_every_step(100),
                                       plain_interval(1),      plain_interval(7),
                                       plain_doubling(1),      plain_doubling(5),
                                       plain_doubling(16),     plain_tied(1),
                                       plain_tied(2),          plain_tied(12),
                                       plain_tied(16),         plain_tied(1000),
                                       plain_doubling(3, 200), plain_steps({1, 2, 9, 30, 31, 300})};
  for (const PlainSchedule& plain : all) {
    const SchedulePtr schedule = library_schedule(plain);
    SCOPED_TRACE(schedule->describe());
    ScheduleState left, right = plain.start();
    std::vector<double> lr{0, 0, 1e-3};
    std::int64_t happened = 0;
    for (std::int64_t t = 1; t <= 600; ++t) {
      const std::uint64_t x = mix(static_cast<std::uint64_t>(t));
      double& one = lr[x % 3];
      if (x / 3 % 4 == 0) one = x / 12 % 5 == 0 ? 0 : x / 12 % 5 == 1 ? 1e-3 : one * 0.7;
      Schedule::observe(left, lr);
      PlainSchedule::observe(right, lr);
      ASSERT_EQ(schedule->due(left, t), plain.due(right, t)) << "step " << t;
      if (!plain.due(right, t) || x / 60 % 4 == 0) continue;  // some events have to wait
      schedule->advance(left, t, lr);
      plain.advance(right, t, lr);
      ASSERT_EQ(left, right) << "step " << t;
      ++happened;
    }
    EXPECT_GT(happened, 3);
  }
}

TEST(Schedules, GapsNeverExceedTheMaximum) {
  for (std::int64_t h = 1; h <= 40; ++h) {
    for (const PlainSchedule& sync : {plain_interval(h), plain_tied(h)}) {
      Trial trial({.recipe = {plain_doubling(2), sync, Scale::kL1, true, false}, .groups = {{3}}});
      std::int64_t last = 0, widest = 0;
      for (std::int64_t t = 1; t <= 200; ++t) {
        const bool restart = mix(static_cast<std::uint64_t>(t)) % 90 == 0;
        const double lr = restart ? 1 : std::pow(0.5, static_cast<double>(t) / 14);
        if (trial.step(t, {{.lr = lr}}) == StepKind::kLocal) continue;
        widest = std::max(widest, t - last);
        last = t;
      }
      EXPECT_EQ(widest, h);
    }
  }
}

// 9. Bytes are those of the closed form, by hand: W = 3, n = 100 + 37 + 9, L = 8 ceil(146 / 24) =
// 56, chunks [0, 56), [56, 112), [112, 146) with 1, 2 and 2 blocks.
TEST(Bytes, AreTheClosedForm) {
  Trial trial({.recipe = {plain_every_step(5), plain_interval(3), Scale::kL1, true, false},
               .groups = {{100, 37, 9}},
               .world = 3,
               .holes = false});
  for (std::int64_t t = 1; t <= 14; ++t) trial.step(t, options(Plan::kConstant, t, 1));
  ASSERT_EQ(trial.count(StepKind::kRefresh), 5);
  ASSERT_EQ(trial.count(StepKind::kSync), 3);
  trial.expect_accounts();
  const Stats& stats = trial.rank(1).engine->stats();
  EXPECT_EQ(stats.bytes_sent, 5 * 4 * (40 + 4 * 56) + 3 * 4 * (40 + 4 * 2 + 56 / 8));
  EXPECT_NEAR(static_cast<double>(stats.dense_bytes), 14 * 8 * 146 * 2 / 3.0, 14);
  EXPECT_NEAR(stats.bits_per_parameter_step(),
              32.0 * static_cast<double>(stats.bytes_sent) / static_cast<double>(stats.dense_bytes),
              1e-9);
}

// 10. Stop after any step and resume in new engines: no byte differs.
class Resume : public testing::TestWithParam<std::tuple<DType, int>> {};

TEST_P(Resume, AfterAnyStep) {
  const auto [dtype, world] = GetParam();
  for (const bool one_bit : {false, true}) {
    for (const std::int64_t every : {1, 5}) {
      Trial trial({.recipe = one_bit ? plain_one_bit_adam(4)
                                     : PlainRecipe{plain_doubling(2), plain_tied(7), Scale::kL1,
                                                   true, false},
                   .groups = {{70, 0, 33}, {9}},
                   .world = world,
                   .dtype = dtype,
                   .gradient_dtype = dtype});
      std::int64_t inside = 0, locals = 0;
      for (std::int64_t t = 1; t <= 60; ++t) {
        const std::vector<GroupOptions> o = options(t < 30 ? Plan::kDecay : Plan::kZeros, t, 2);
        locals += trial.step(t, o) == StepKind::kLocal ? 1 : 0;
        if (t % every != 0) continue;
        inside += trial.twin().pending() ? 1 : 0;
        trial.restart(o);
        if (HasFailure()) return;
      }
      EXPECT_EQ(inside > 0, !one_bit);
      EXPECT_GT(locals, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Identity, Resume,
                         testing::Combine(testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(1, 3)));

TEST(Resume, RefusesBytesThatAreNotWhole) {
  Trial trial({.recipe = {plain_doubling(2), plain_interval(3), Scale::kL1, true, false},
               .groups = {{40}, {9}}});
  Trial other({.recipe = {plain_doubling(2), plain_interval(3), Scale::kL1, true, false},
               .groups = {{41}, {8}}});
  for (std::int64_t t = 1; t <= 9; ++t) trial.step(t, options(Plan::kConstant, t, 2));
  Engine& engine = *trial.rank(0).engine;
  const std::vector<std::byte> whole = engine.save();
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{7}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_THROW(engine.load(std::span(whole).first(size)), InvalidArgument) << size;
  }
  std::vector<std::byte> longer = whole;
  longer.push_back({});
  EXPECT_THROW(engine.load(longer), InvalidArgument);
  EXPECT_THROW(engine.load(other.rank(0).engine->save()), InvalidArgument);
  EXPECT_EQ(engine.save(), whole);
  trial.step(10, options(Plan::kConstant, 10, 2));
}

}  // namespace
}  // namespace zeroone::test
