// Every byte of the engine's state, parameters and counters against the plain twin, after every
// step.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "plain_twin.h"
#include "plans.h"
#include "trial.h"
#include "zeroone/instruction_set.h"

namespace zeroone::test {
namespace {

using testing::Combine;
using testing::Range;
using testing::Values;
using testing::ValuesIn;

// n elements as one tensor; as three groups with empty tensors, one of them all empty; as many
// tensors of growing size, which cross the borders of chunks.
std::vector<std::vector<std::int64_t>> split(std::int64_t n, int style) {
  if (style == 0) return {{n}};
  if (style == 1) return {{n / 3, 0, n - n / 3 - n / 5}, {0}, {n / 5, 0}};
  std::vector<std::vector<std::int64_t>> groups{{}, {}};
  std::int64_t size = 1;
  for (std::int64_t left = n; left > 0; left -= size, size += size / 2 + 1) {
    size = std::min(size, left);
    groups[groups[0].size() > groups[1].size() ? 1 : 0].push_back(size);
  }
  return groups;
}

void run_steps(Trial& trial, Plan plan, std::int64_t steps) {
  for (std::int64_t t = 1; t <= steps; ++t) {
    trial.step(t, options(plan, t, trial.groups().size()));
    if (testing::Test::HasFailure()) return;
  }
  trial.expect_accounts();
}

void expect_all_kinds(const Trial& trial) {
  EXPECT_GT(trial.count(StepKind::kLocal), 0);
  EXPECT_GT(trial.count(StepKind::kSync), 0);
  EXPECT_GT(trial.count(StepKind::kRefresh), 0);
}

// What the vectors of a whole run must not be, so that comparing them means something.
void expect_nontrivial(const Trial& trial) {
  const Twin<float>::Slab& s = trial.twin().slab(0);
  const auto nonzero = [](const std::vector<float>& v) {
    return std::any_of(v.begin(), v.end(), [](float x) { return x != 0; });
  };
  EXPECT_TRUE(nonzero(s.v));
  EXPECT_TRUE(nonzero(s.m[0]));
  EXPECT_TRUE(nonzero(s.a));
  // The residuals of one single element are 0: its scale is its magnitude.
  if (s.layout.numel > 16) {
    EXPECT_TRUE(nonzero(s.worker_error[0]));
  }
}

class SizesAndRanks : public testing::TestWithParam<std::tuple<int, int>> {};

// The other settings rotate, each with a period of its own, so that all pairs of settings meet.
TEST_P(SizesAndRanks, EveryByteAgrees) {
  constexpr std::int64_t kSizes[] = {1, 2, 3, 7, 8, 9, 63, 64, 65, 1023, 4097, 100003};
  constexpr int kWorlds[] = {1, 2, 3, 4, 5, 8, 16};
  constexpr std::int64_t kIntervals[] = {1, 3, 4, 16};
  const auto [i, j] = GetParam();
  const std::int64_t n = kSizes[i];
  const std::int64_t interval = kIntervals[(i + 3 * j) % 4];
  Problem problem{
      .recipe = {plain_doubling(2), plain_interval(interval),
                 (i + j) % 2 == 0 ? Scale::kL1 : Scale::kL2, (i / 2 + j) % 2 == 0, false},
      .groups = split(n, (i + j) % 3),
      .world = kWorlds[j],
      .threads = 1 + (i + j / 2) % 3,
  };
  Trial trial(problem);
  run_steps(trial, static_cast<Plan>((5 * i + j) % kPlans), n > 50'000 ? 22 : 44);
  EXPECT_GT(trial.count(StepKind::kSync), 0);
  EXPECT_GT(trial.count(StepKind::kRefresh), 0);
  if (interval > 1) {
    EXPECT_GT(trial.count(StepKind::kLocal), 0);
  }
  expect_nontrivial(trial);
}

INSTANTIATE_TEST_SUITE_P(Twin, SizesAndRanks, Combine(Range(0, 12), Range(0, 7)));

class Plans : public testing::TestWithParam<std::tuple<int, Scale, int>> {};

TEST_P(Plans, ZeroOneAdamAtAnyInterval) {
  const auto [plan, scale, world] = GetParam();
  for (const std::int64_t interval : {1, 3, 4, 16}) {
    SCOPED_TRACE("interval " + std::to_string(interval));
    Trial trial({.recipe = {plain_doubling(3), plain_interval(interval), scale, true, false},
                 .groups = {{30, 0, 41}, {17, 8}, {9}},
                 .world = world});
    run_steps(trial, static_cast<Plan>(plan), 70);
    if (interval > 1) expect_all_kinds(trial);
    expect_nontrivial(trial);
  }
}

TEST_P(Plans, ZeroOneAdamTiedToTheLearningRate) {
  const auto [plan, scale, world] = GetParam();
  for (const std::int64_t max_interval : {1, 5, 16}) {
    SCOPED_TRACE("max_interval " + std::to_string(max_interval));
    Trial trial({.recipe = {plain_doubling(4, 90), plain_tied(max_interval), scale, false, false},
                 .groups = {{30, 0, 41}, {17, 8}, {9}},
                 .world = world});
    run_steps(trial, static_cast<Plan>(plan), 120);
    if (max_interval > 1 && static_cast<Plan>(plan) == Plan::kDecay) expect_all_kinds(trial);
    EXPECT_GT(trial.count(StepKind::kSync), 0);
  }
}

TEST_P(Plans, OneBitAdam) {
  const auto [plan, scale, world] = GetParam();
  for (const bool bias_correction : {false, true}) {
    Trial trial({.recipe = plain_one_bit_adam(6, scale, bias_correction),
                 .groups = {{30, 0, 41}, {17, 8}, {9}},
                 .world = world});
    run_steps(trial, static_cast<Plan>(plan), 40);
    EXPECT_GE(trial.count(StepKind::kRefresh), 6);
    EXPECT_GT(trial.count(StepKind::kSync), 20);
    expect_nontrivial(trial);
  }
}

TEST_P(Plans, AdamW) {
  const auto [plan, scale, world] = GetParam();
  Trial trial({.recipe = plain_adamw(scale == Scale::kL1),
               .groups = {{30, 0, 41}, {17, 8}, {9}},
               .world = world});
  run_steps(trial, static_cast<Plan>(plan), 40);
  EXPECT_EQ(trial.count(StepKind::kRefresh), 40);
}

INSTANTIATE_TEST_SUITE_P(Twin, Plans,
                         Combine(Range(0, kPlans), Values(Scale::kL1, Scale::kL2),
                                 Values(1, 2, 3, 5)));

// The first step is a refresh whatever the list says; a refresh that must wait comes after the next
// sync.
TEST(Twin, ListedSteps) {
  Trial trial({.recipe = {plain_steps({4, 5, 9, 20}), plain_steps({2, 8, 9, 15, 19, 30, 31}),
                          Scale::kL1, true, false},
               .groups = {{100, 33}},
               .world = 3});
  std::string kinds;
  for (std::int64_t t = 1; t <= 34; ++t)
    kinds += "LRSK"[static_cast<int>(trial.step(t, options(Plan::kConstant, t, 1)))];
  EXPECT_EQ(kinds, "RSLLLLLSRLLLLLSLLLSRLLLLLLLLLSSLLL");
  trial.expect_accounts();
}

// A refresh that has not taken place by `until` takes place no more, where nothing is left to be born.
TEST(Twin, UntilIsTheLastStepThatChangesV) {
  for (std::int64_t until = 1; until <= 24; ++until) {
    Trial trial({.recipe = {plain_doubling(1, until), plain_interval(4), Scale::kL1, true, false},
                 .groups = {{50}},
                 .world = 2,
                 .holes = false});
    for (std::int64_t t = 1; t <= 40; ++t) {
      const StepKind kind = trial.step(t, options(Plan::kConstant, t, 1));
      EXPECT_FALSE(kind == StepKind::kRefresh && t > until) << "t " << t << ", until " << until;
    }
    EXPECT_GT(trial.count(StepKind::kRefresh), 0);
  }
}

TEST(Twin, SyncsByCall) {
  Trial trial({.recipe = {plain_doubling(3), plain_tied(16), Scale::kL1, true, false},
               .groups = {{70, 5}, {11}},
               .world = 3});
  int sent = 0, idle = 0;
  for (std::int64_t t = 1; t <= 90; ++t) {
    const std::vector<GroupOptions> o = options(t < 50 ? Plan::kDecay : Plan::kStillGroup, t, 2);
    trial.step(t, o);
    if (mix(static_cast<std::uint64_t>(t)) % 4 == 0) ++(trial.sync(o) ? sent : idle);
  }
  EXPECT_GT(sent, 3);
  EXPECT_GT(idle, 3);
  expect_all_kinds(trial);
  trial.expect_accounts();
}

// A rank whose gradient is not finite, wherever, counts as zero; where no rank has a finite one, a
// step with an exchange, and on one rank any step, leaves no trace.
enum class Where { kBorn, kUnborn, kStillGroup };

void PrintTo(Where where, std::ostream* out) {
  constexpr std::array<const char*, 3> kNames{"at a born coordinate", "at an unborn coordinate",
                                              "in a group whose learning rate is 0"};
  *out << kNames[static_cast<std::size_t>(where)];
}

class NonFinite : public testing::TestWithParam<std::tuple<int, Where>> {};

TEST_P(NonFinite, CountsAsZeroOrSkips) {
  const auto [world, where] = GetParam();
  const auto place = [where = where](std::int64_t draw, int rank) -> std::optional<Place> {
    const std::uint64_t x = mix(static_cast<std::uint64_t>(draw));
    const bool all = x % 3 == 0, one = x % 3 == 1 && rank == static_cast<int>(x / 3 % 3);
    if (!all && !one) return std::nullopt;
    if (where == Where::kUnborn) return Place{0, 3};
    if (where == Where::kStillGroup) return Place{1, 6};
    return (x / 9 + static_cast<std::uint64_t>(rank)) % 2 == 0 ? Place{0, 40} : Place{1, 6};
  };
  Trial trial({.recipe = {plain_doubling(2), plain_interval(3), Scale::kL1, true, false},
               .groups = {{70, 5}, {11}},
               .world = world,
               .nonfinite = place});
  const Plan plan = where == Where::kStillGroup ? Plan::kStillGroup : Plan::kConstant;
  std::int64_t hits = 0, survived = 0;
  for (std::int64_t t = 1; t <= 120; ++t) {
    const StepKind kind = trial.step(t, options(plan, t, 2));
    if (HasFailure()) return;
    hits += place(t, 0) ? 1 : 0;
    survived += place(t, 0) && kind != StepKind::kSkipped ? 1 : 0;
  }
  EXPECT_EQ(survived > 5, world > 1);
  EXPECT_GT(trial.count(StepKind::kSkipped), 10);
  expect_all_kinds(trial);
  const Stats& stats = trial.rank(0).engine->stats();
  EXPECT_EQ(stats.skipped_steps, trial.count(StepKind::kSkipped));
  EXPECT_EQ(stats.nonfinite_gradients, hits);
  EXPECT_EQ(stats.bytes_sent, trial.rank(0).communicator->bytes_sent() - trial.sent_before(0));
}

INSTANTIATE_TEST_SUITE_P(Twin, NonFinite,
                         Combine(Values(1, 2, 3),
                                 Values(Where::kBorn, Where::kUnborn, Where::kStillGroup)));

TEST(Twin, ThreadsGiveTheSameBytes) {
  for (int threads = 1; threads <= 3; ++threads) {
    SCOPED_TRACE("threads " + std::to_string(threads));
    Trial trial({.recipe = {plain_doubling(2), plain_interval(3), Scale::kL2, true, false},
                 .groups = {{20'001, 7, 4099}, {9001}},
                 .world = 2,
                 .threads = threads});
    run_steps(trial, Plan::kDrop, 22);
    expect_all_kinds(trial);
  }
}

class InstructionSets : public testing::TestWithParam<std::string_view> {};

TEST_P(InstructionSets, GiveTheSameBytes) {
  const std::string_view before = instruction_set();
  select_instruction_set(GetParam());
  constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (const DType dtype : kTypes) {
    for (const DType gradient_dtype : kTypes) {
      for (const Scale scale : {Scale::kL1, Scale::kL2}) {
        Trial trial({.recipe = {plain_doubling(2), plain_interval(3), scale, true, false},
                     .groups = {{2049, 7, 4099}, {31, 33}, {5}},
                     .world = 3,
                     .dtype = dtype,
                     .gradient_dtype = gradient_dtype});
        run_steps(trial, Plan::kDrop, 22);
        expect_all_kinds(trial);
        Trial one_bit({.recipe = plain_one_bit_adam(3, scale),
                       .groups = {{2049, 7}, {31}},
                       .world = 2,
                       .dtype = dtype,
                       .gradient_dtype = gradient_dtype});
        run_steps(one_bit, Plan::kDrop, 12);
      }
    }
  }
  select_instruction_set(before);
}

INSTANTIATE_TEST_SUITE_P(
    Twin, InstructionSets, ValuesIn(available_instruction_sets()), [](const auto& set) {
      std::string name(set.param);
      std::replace_if(name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
      return name;
    });

// The bare collective: every coordinate counts as born.
class BareCollective : public testing::TestWithParam<std::tuple<std::int64_t, int, Scale>> {};

TEST_P(BareCollective, EveryByteAgrees) {
  const auto [n, world, scale] = GetParam();
  const Layout layout({n}, world);
  const auto size = static_cast<std::size_t>(n);
  const auto ranks = static_cast<std::size_t>(world);
  const std::vector<char> born(size, 1);
  std::vector<std::vector<float>> worker_error(ranks, std::vector<float>(size)),
      values = worker_error;
  std::vector<float> server_error(size), expected;

  ThreadGroup group(world, kPatience);
  std::vector<std::unique_ptr<SpyCommunicator>> communicators;
  std::vector<std::unique_ptr<OneBitAllReduce>> collectives(ranks);
  for (int r = 0; r < world; ++r)
    communicators.push_back(std::make_unique<SpyCommunicator>(group, r));
  run_ranks(group, world, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    collectives[r] = std::make_unique<OneBitAllReduce>(*communicators[r], n, scale);
  });
  std::vector<std::int64_t> sent;
  for (const auto& communicator : communicators) sent.push_back(communicator->bytes_sent());

  constexpr int kRounds = 5;
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t r = 0; r < ranks; ++r) {
      for (std::size_t i = 0; i < size; ++i) {
        // First signs alone, opposite on neighbouring ranks, and zeros of both signs: some means
        // are 0 too.
        const float sign = (i + r) % 2 == 0 ? 1.0F : -1.0F;
        values[r][i] = round == 0 ? (i % 3 == 0 ? 0.0F : 1.0F) * sign
                                  : noise(mix(static_cast<std::uint64_t>(round) * 99 + r) + i);
      }
    }
    expected = one_bit_mean(layout, born, scale, 1.0F, values, worker_error, server_error);
    run_ranks(group, world, [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      collectives[r]->reduce(*communicators[r], values[r].data(), 1 + rank % 2);
    });
    for (std::size_t r = 0; r < ranks; ++r) {
      const OneBitAllReduce& collective = *collectives[r];
      const auto begin = static_cast<std::size_t>(collective.chunk_begin());
      const auto chunk = static_cast<std::size_t>(collective.chunk_numel());
      EXPECT_TRUE(same_bytes(values[r].data(), expected.data(), size)) << "rank " << r;
      EXPECT_TRUE(same_bytes(collective.worker_error(), worker_error[r].data(), size))
          << "rank " << r;
      if (chunk > 0) {
        ASSERT_EQ(begin, r * static_cast<std::size_t>(layout.chunk));
        EXPECT_TRUE(same_bytes(collective.server_error(), server_error.data() + begin, chunk))
            << "rank " << r;
      }
    }
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    EXPECT_EQ(collectives[r]->bytes_sent(),
              kRounds * 2 * (world - 1) * (40 + layout.one_bit_bytes()));
    EXPECT_EQ(collectives[r]->bytes_sent(), communicators[r]->bytes_sent() - sent[r]);
  }
}

INSTANTIATE_TEST_SUITE_P(Twin, BareCollective,
                         Combine(Values(1, 7, 8, 9, 64, 65, 1023, 4097, 100'003),
                                 Values(1, 2, 3, 5, 16), Values(Scale::kL1, Scale::kL2)));

TEST(BareCollective, TakesNonFiniteValuesForZero) {
  constexpr std::int64_t kNumel = 100;
  ThreadGroup group(2, kPatience);
  std::vector<std::vector<float>> results(2);
  run_ranks(group, 2, [&](int rank) {
    ThreadCommunicator communicator(group, rank);
    OneBitAllReduce collective(communicator, kNumel);
    std::vector<float> values(kNumel, 1.0F);
    if (rank == 1) values[77] = NAN;
    collective.reduce(communicator, values.data());
    results[static_cast<std::size_t>(rank)] = values;
    std::vector<float> error(collective.worker_error(), collective.worker_error() + kNumel);
    EXPECT_EQ(error, std::vector<float>(kNumel));
    const std::vector<float> before(kNumel, INFINITY);
    values = before;
    EXPECT_THROW(collective.reduce(communicator, values.data()), InvalidArgument);
    EXPECT_EQ(values, before);
    EXPECT_EQ(error,
              std::vector<float>(collective.worker_error(), collective.worker_error() + kNumel));
  });
  for (const std::vector<float>& result : results)
    EXPECT_EQ(result, std::vector<float>(kNumel, 0.5F));
}

template <typename T>
T read(const std::vector<std::byte>& bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

// docs/arithmetic.md, "Message": 2 ranks, slabs of 10 + 3 and of 20 elements, so chunks of 8 and
// of 16.
TEST(Wire, MessagesAreTheDocumentedOnes) {
  Trial trial({.recipe = {plain_every_step(3), plain_interval(1), Scale::kL1, false, false},
               .groups = {{10, 3}, {20}},
               .world = 2,
               .holes = false});
  for (std::int64_t t = 1; t <= 8; ++t) {
    const std::vector<GroupOptions> o = options(Plan::kConstant, t, 2);
    trial.draw(t);
    std::vector<std::vector<float>> gradients, b, decoded;  // of rank 1; rho is 1
    for (std::size_t g = 0; g < 2; ++g) {
      const Twin<float>::Slab& s = trial.twin().slab(g);
      std::vector<char> born;
      gradients.push_back(trial.gradients()[1][g]);
      b.emplace_back();
      for (std::size_t i = 0; i < s.a.size(); ++i) {
        if (o[g].maximize) gradients[g][i] = -gradients[g][i];
        const float kept = static_cast<float>(o[g].beta1) * s.m[1][i];
        const float added = static_cast<float>(1 - o[g].beta1) * gradients[g][i];
        const float u = static_cast<float>(o[g].lr) * (kept + added);
        born.push_back(s.v[i] > 0);
        b[g].push_back(born[i] ? u + s.worker_error[1][i] : 0.0F);
      }
      decoded.push_back(one_bit(s.layout, born, Scale::kL1, b[g]));
    }
    const bool refresh = trial.step(t, o) == StepKind::kRefresh;
    const std::vector<std::byte>& headers = trial.rank(1).communicator->headers();
    const std::vector<std::byte>& sent = trial.rank(1).communicator->bodies();
    ASSERT_EQ(headers.size(), 2U * 40);
    ASSERT_EQ(sent.size(), 2U * (refresh ? 4 * 8 + 4 * 16 : 4 * 2 + 8 / 8 + 4 * 1 + 16 / 8));
    for (std::size_t j = 0; j < 2; ++j) {
      const std::size_t header = j * 40;
      EXPECT_EQ(read<std::uint32_t>(headers, header), 0x306f657aU);
      EXPECT_EQ(read<std::uint16_t>(headers, header + 4), refresh ? 1 : 2);
      EXPECT_EQ(read<std::uint16_t>(headers, header + 6), 0);
      EXPECT_EQ(read<std::int64_t>(headers, header + 8), t);
      EXPECT_EQ(read<double>(headers, header + 16), o[0].lr);
      std::size_t section = j * sent.size() / 2;
      for (std::size_t g = 0; g < 2; ++g) {
        const Layout& layout = trial.twin().slab(g).layout;
        const std::size_t begin = j * static_cast<std::size_t>(layout.chunk);
        const std::size_t bits = section + 4 * static_cast<std::size_t>(layout.most_blocks);
        std::size_t scale = section;
        for (const Layout::Block& block : layout.blocks) {
          if (static_cast<std::size_t>(block.chunk_begin) != begin) continue;
          for (auto i = static_cast<std::size_t>(block.begin);
               i < static_cast<std::size_t>(block.end); ++i) {
            if (refresh) {
              EXPECT_EQ(read<float>(sent, section + 4 * (i - begin)), gradients[g][i]);
              continue;
            }
            const int bit =
                (read<std::uint8_t>(sent, bits + (i - begin) / 8) >> ((i - begin) % 8)) & 1;
            EXPECT_EQ(bit, b[g][i] < 0 ? 1 : 0) << "element " << i << " of group " << g;
            if (decoded[g][i] != 0) {
              EXPECT_EQ(read<float>(sent, scale), std::abs(decoded[g][i]));
            }
          }
          scale += 4;
        }
        section +=
            static_cast<std::size_t>(refresh ? layout.dense_bytes() : layout.one_bit_bytes());
      }
    }
  }
  EXPECT_EQ(trial.count(StepKind::kSync), 5);
}

}  // namespace
}  // namespace zeroone::test
