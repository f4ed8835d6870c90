// A round takes place on all ranks or leaves no trace, and ranks that disagree are told so.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "plans.h"
#include "trial.h"

namespace zeroone::test {
namespace {

// All that a step may change, of one rank.
struct Trace {
  std::vector<std::byte> state;
  std::vector<std::vector<std::byte>> parameters;
  Counters counters;

  friend bool operator==(const Trace&, const Trace&) = default;
};

std::vector<Trace> traces(Trial& trial) {
  std::vector<Trace> result;
  for (int r = 0; r < trial.world(); ++r) {
    const Trial::Rank& rank = trial.rank(r);
    result.push_back({rank.engine->save(), rank.parameters, rank.engine->counters()});
  }
  return result;
}

// Runs `body` on all ranks, each of which must throw an E; returns what they said.
template <typename E, typename Body>
std::vector<std::string> failures(Trial& trial, const Body& body) {
  std::vector<std::string> said(static_cast<std::size_t>(trial.world()));
  trial.run([&](Trial::Rank& rank) {
    const int r = rank.communicator->rank();
    try {
      body(rank, r);
      ADD_FAILURE() << "rank " << r << " did not throw";
    } catch (const E& error) {
      said[static_cast<std::size_t>(r)] = error.what();
    }
  });
  return said;
}

void expect_naming(const std::vector<std::string>& said, const std::vector<std::string>& parts) {
  for (const std::string& message : said) {
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
    }
  }
}

class Rounds : public testing::TestWithParam<PlainRecipe> {};

TEST_P(Rounds, CommitOrLeaveNoTrace) {
  Trial trial({.recipe = GetParam(), .groups = {{500, 0, 33}, {65}}, .world = 3, .threads = 2});
  const auto fail_all = [&](int operation, bool after_transfer, const auto& body) {
    const std::vector<Trace> before = traces(trial);
    const std::vector<std::string> said =
        failures<PlannedFailure>(trial, [&](Trial::Rank& rank, int) {
          rank.communicator->fail_after(operation, after_transfer);
          body(rank);
        });
    EXPECT_TRUE(traces(trial) == before) << "operation " << operation;
    trial.expect_equal();
    expect_naming(said, {after_transfer ? "after" : "before"});
  };
  std::int64_t calls = 0;
  for (std::int64_t t = 1; t <= 40; ++t) {
    SCOPED_TRACE("step " + std::to_string(t));
    const std::vector<GroupOptions> o = options(Plan::kZeros, t, 2);
    trial.draw(t);
    const auto step = [&](Trial::Rank& rank) {
      rank.engine->step(*rank.communicator, rank.tensors, o, 2);
    };
    const bool communicates = trial.rank(0).engine->next_step(o) != StepKind::kLocal;
    if (communicates) {
      for (const int operation : {0, 1, 2}) {
        for (const bool after_transfer : {false, true}) fail_all(operation, after_transfer, step);
      }
    } else {
      trial.run([](Trial::Rank& rank) { rank.communicator->fail_after(0, false); });
    }
    // What happens now is what would have happened undisturbed.
    const std::int64_t operations = trial.rank(0).communicator->operations();
    const StepKind kind = trial.step(t, o);
    EXPECT_EQ(kind != StepKind::kLocal, communicates);
    EXPECT_EQ(trial.rank(0).communicator->operations() - operations, communicates ? 3 : 0);
    trial.run([](Trial::Rank& rank) { rank.communicator->disarm(); });

    if (trial.twin().pending() && t % 5 == 0) {
      for (const int operation : {0, 1, 2}) {
        fail_all(operation, false, [&](Trial::Rank& rank) {
          rank.engine->sync(*rank.communicator, rank.tensors, o, 2);
        });
      }
      EXPECT_TRUE(trial.sync(o));
      ++calls;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(trial.count(StepKind::kRefresh), 3);
  EXPECT_GT(trial.count(StepKind::kSync), 5);
  if (!GetParam().sums_momentum) {
    EXPECT_GT(calls, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Transaction, Rounds,
                         testing::Values(PlainRecipe{plain_doubling(2), plain_interval(3),
                                                     Scale::kL1, true, false},
                                         plain_one_bit_adam(5, Scale::kL2)));

// One rank fails alone: the others wait until the group is given up, and change nothing either.
TEST(Transaction, OneFailingRank) {
  for (const int operation : {0, 1, 2}) {
    Trial trial({.recipe = {plain_every_step(2), plain_interval(3), Scale::kL1, true, false},
                 .groups = {{500, 33}},
                 .world = 3});
    const std::vector<GroupOptions> o = options(Plan::kConstant, 1, 1);
    for (std::int64_t t = 1; t <= 4; ++t) trial.step(t, o);
    const std::vector<Trace> before = traces(trial);
    trial.rank(1).communicator->fail_after(operation, false);
    trial.draw(5);
    std::vector<std::string> said(3);
    trial.run([&](Trial::Rank& rank) {
      const auto r = static_cast<std::size_t>(rank.communicator->rank());
      try {
        rank.engine->step(*rank.communicator, rank.tensors, o);
      } catch (const PlannedFailure&) {
        said[r] = "planned";
        trial.group().abort("rank 1 gave up");
      } catch (const CommunicationError& error) {
        said[r] = error.what();
      }
    });
    EXPECT_EQ(said[1], "planned");
    expect_naming({said[0], said[2]}, {"rank 1 gave up"});
    EXPECT_TRUE(traces(trial) == before);
  }
}

class Disagreement : public testing::Test {
 protected:
  // Stands before a sync, in an interval.
  Disagreement()
      : trial_({.recipe = {plain_every_step(2), plain_interval(3), Scale::kL1, true, false},
                .groups = {{50, 33}, {7}},
                .world = 3}) {
    for (std::int64_t t = 1; t <= 4; ++t) trial_.step(t, options_);
    trial_.draw(5);
    before_ = traces(trial_);
  }

  // The step after the disagreement is as if there had been none.
  void expect_recovery() {
    EXPECT_TRUE(traces(trial_) == before_);
    EXPECT_EQ(trial_.step(5, options_), StepKind::kSync);
  }

  const std::vector<GroupOptions> options_ = options(Plan::kConstant, 1, 2);
  Trial trial_;
  std::vector<Trace> before_;
};

struct Difference {
  std::string name;
  std::string right, wrong;  // values, as they appear in the message
  std::function<void(GroupOptions&)> make;
};

TEST_F(Disagreement, OverASetting) {
  const std::vector<Difference> differences{
      {"lr", "0.002", "0.25", [](GroupOptions& o) { o.lr = 0.25; }},
      {"betas", "0.8", "0.25", [](GroupOptions& o) { o.beta1 = 0.25; }},
      {"betas", "0.8", "0.25", [](GroupOptions& o) { o.beta2 = 0.25; }},
      {"eps", "1e-08", "0.25", [](GroupOptions& o) { o.eps = 0.25; }},
      {"weight_decay", "0", "0.25", [](GroupOptions& o) { o.weight_decay = 0.25; }},
      {"maximize", "True", "False", [](GroupOptions& o) { o.maximize = false; }},
  };
  for (const Difference& difference : differences) {
    const auto said = failures<DisagreementError>(trial_, [&](Trial::Rank& rank, int r) {
      std::vector<GroupOptions> o = options_;
      if (r == 2) difference.make(o[1]);
      rank.engine->step(*rank.communicator, rank.tensors, o);
    });
    expect_naming(said, {difference.name, "group 1", difference.right, difference.wrong, "rank 2"});
  }
  expect_recovery();
}

TEST_F(Disagreement, OverTheFirstLearningRate) {
  const auto said = failures<DisagreementError>(trial_, [&](Trial::Rank& rank, int r) {
    std::vector<GroupOptions> o = options_;
    if (r == 0) o[0].lr = 0.0625;
    rank.engine->step(*rank.communicator, rank.tensors, o);
  });
  expect_naming(said, {"lr", "0.001", "0.0625"});
  expect_recovery();
}

TEST_F(Disagreement, OverTheOperation) {
  const auto said = failures<DisagreementError>(trial_, [&](Trial::Rank& rank, int r) {
    if (r == 0) {
      rank.engine->sync(*rank.communicator, rank.tensors, options_);
    } else {
      rank.engine->step(*rank.communicator, rank.tensors, options_);
    }
  });
  expect_naming(said, {"rank 0 has sync() called at step 4", "rank 1 has a sync at step 5"});
  expect_recovery();
}

TEST_F(Disagreement, AnErrorOfOneRankReachesAll) {
  const auto said = failures<DisagreementError>(trial_, [&](Trial::Rank& rank, int r) {
    rank.engine->step(*rank.communicator, rank.tensors, options_, 1,
                      r == 1 ? "gradient is sparse" : "");
  });
  expect_naming(said, {"rank 1", "gradient is sparse"});
  expect_recovery();
}

TEST_F(Disagreement, OverAdoptedValues) {
  for (int r = 0; r < 3; ++r) {
    Trial::Rank& rank = trial_.rank(r);
    const std::vector<float> values(50, r == 1 ? 0.5F : 0.25F);
    std::memcpy(rank.parameters[0].data(), values.data(), 200);
    rank.engine->adopt(rank.tensors, options_, std::vector<std::int64_t>{0});
  }
  const auto said = failures<DisagreementError>(trial_, [&](Trial::Rank& rank, int) {
    rank.engine->step(*rank.communicator, rank.tensors, options_);
  });
  expect_naming(said, {"parameters", "loaded", "rank 0", "rank 1"});
}

// What every rank says if rank 1 attaches with another layout, recipe, setting or an error.
std::vector<std::string> attach_failures(
    const std::vector<std::vector<std::vector<TensorSpec>>>& layouts,
    const std::vector<Recipe>& recipes, const std::vector<Fingerprint>& settings,
    const std::vector<std::string>& errors) {
  std::vector<std::string> said(2);
  ThreadGroup group(2, kPatience);
  run_ranks(group, 2, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    ThreadCommunicator communicator(group, rank);
    Engine engine(recipes[r], layouts[r]);
    std::vector<std::vector<float>> values;
    std::vector<Tensor> tensors;
    for (const auto& specs : layouts[r]) {
      for (const TensorSpec& spec : specs)
        values.emplace_back(static_cast<std::size_t>(spec.numel), static_cast<float>(rank));
    }
    for (std::vector<float>& v : values) tensors.push_back({.data = v.data()});
    try {
      engine.attach(communicator, tensors, settings[r], true, errors[r]);
      ADD_FAILURE() << "rank " << r << " did not throw";
    } catch (const DisagreementError& error) {
      said[r] = error.what();
    }
    EXPECT_FALSE(engine.attached());
    for (const std::vector<float>& v : values) {
      for (const float x : v) ASSERT_EQ(x, static_cast<float>(rank));
    }
  });
  return said;
}

TEST(Attach, NamesWhatDiffers) {
  const std::vector<std::vector<TensorSpec>> layout{{{"weight", 1234}, {"bias", 10}},
                                                    {{"head", 5}}};
  const Recipe recipe = zero_one_adam();
  std::vector<std::vector<TensorSpec>> other = layout;
  other[0][0].numel = 4321;
  expect_naming(attach_failures({layout, other}, {recipe, recipe}, {{}, {}}, {"", ""}),
                {"weight", "1234", "4321"});
  other = layout;
  other[0][1].name = "offset";
  expect_naming(attach_failures({layout, other}, {recipe, recipe}, {{}, {}}, {"", ""}),
                {"bias", "offset"});
  other = layout;
  other.emplace_back();
  other[2].push_back({"tail", 3});
  attach_failures({layout, other}, {recipe, recipe}, {{}, {}}, {"", ""});
  expect_naming(
      attach_failures({layout, layout}, {zero_one_adam(doubling(16)), zero_one_adam(doubling(5))},
                      {{}, {}}, {"", ""}),
      {"Doubling(kappa=16", "Doubling(kappa=5"});
  expect_naming(attach_failures({layout, layout}, {recipe, recipe},
                                {{{"group 0 lr", "0.5"}}, {{"group 0 lr", "0.125"}}}, {"", ""}),
                {"group 0 lr", "0.5", "0.125"});
  expect_naming(
      attach_failures({layout, layout}, {recipe, recipe}, {{}, {}}, {"", "lr is negative: -1"}),
      {"lr is negative: -1"});
}

}  // namespace
}  // namespace zeroone::test
