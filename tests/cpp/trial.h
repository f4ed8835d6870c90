// A trial: the library's engine on several thread ranks beside the plain twin, step by step,
// compared byte by byte.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plain_twin.h"
#include "ranks.h"
#include "zeroone/zeroone.h"

namespace zeroone {

// For messages of failed comparisons.
inline void PrintTo(StepKind kind, std::ostream* out) {
  constexpr std::array<const char*, 4> kNames{"local", "refresh", "sync", "skipped"};
  *out << kNames[static_cast<std::size_t>(kind)];
}

inline void PrintTo(const ScheduleState& s, std::ostream* out) {
  *out << "{next " << s.next << ", index " << s.index << ", peak";
  for (const double x : s.peak_lr) *out << ' ' << x;
  *out << ", last";
  for (const double x : s.last_lr) *out << ' ' << x;
  *out << '}';
}

inline void PrintTo(const Counters& c, std::ostream* out) {
  *out << "step " << c.step << ", last sync " << c.last_sync << ", refresh ";
  PrintTo(c.refresh, out);
  *out << ", sync ";
  PrintTo(c.sync, out);
  for (const SlabCounters& s : c.slabs) {
    *out << ", slab {step " << s.step << ", k " << s.refreshes << ", pending " << s.pending
         << ", S " << s.sum << ", S_prev " << s.previous_sum << ", P " << s.decay << '}';
  }
}

}  // namespace zeroone

namespace zeroone::test {

/// A well mixed function of x (splitmix64).
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// Uniform in [-1, 1).
constexpr float noise(std::uint64_t seed) {
  return static_cast<float>(static_cast<std::int64_t>(mix(seed)) >> 40) * 0x1p-23F;
}

/// A 16-bit format: bits of its mantissa and its smallest exponent.
struct Format16 {
  int mantissa;
  int min_exponent;
};
constexpr Format16 format_of(DType dtype) {
  return dtype == DType::kFloat16 ? Format16{10, -14} : Format16{7, -126};
}

/// Nearest 16-bit value, ties to even, written without bit tricks on the float.
inline std::uint16_t to_16_bits(float x, DType dtype) {
  const auto [mantissa, min_exponent] = format_of(dtype);
  const float magnitude = std::abs(x);
  const int infinity = (-2 * min_exponent + 3) << mantissa;
  int bits = 0;
  if (std::isnan(x)) {
    bits = infinity + 1;
  } else if (std::isinf(x)) {
    bits = infinity;
  } else if (magnitude > 0) {
    const int exponent = std::max(std::ilogb(magnitude), min_exponent);
    const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa - exponent)));
    bits = std::min(infinity, ((exponent - min_exponent) << mantissa) + units);
  }
  return static_cast<std::uint16_t>(bits | (std::signbit(x) ? 0x8000 : 0));
}

inline float from_16_bits(std::uint16_t bits, DType dtype) {
  const auto [mantissa, min_exponent] = format_of(dtype);
  const int magnitude = bits & 0x7fff;
  const int exponent = std::max(1, magnitude >> mantissa);
  const int units = magnitude - ((exponent - 1) << mantissa);
  const float value = std::ldexp(static_cast<float>(units), min_exponent + exponent - 1 - mantissa);
  return (bits & 0x8000) != 0 ? -value : value;
}

inline float nearest(float x, DType dtype) {
  return dtype == DType::kFloat32 ? x : from_16_bits(to_16_bits(x, dtype), dtype);
}

inline SchedulePtr library_schedule(const PlainSchedule& schedule) {
  switch (schedule.kind) {
    case PlainSchedule::Kind::kEveryStep:
      return every_step(schedule.until);
    case PlainSchedule::Kind::kInterval:
      return interval(schedule.number);
    case PlainSchedule::Kind::kDoubling:
      return doubling(schedule.number, schedule.until);
    case PlainSchedule::Kind::kLearningRateTied:
      return learning_rate_tied(schedule.number);
    case PlainSchedule::Kind::kSteps:
      return steps(schedule.list);
  }
  return nullptr;
}

/// 1-bit Adam, 2102.02888, is dense Adam for `warmup` steps and then one bit of m in each.
inline PlainRecipe plain_one_bit_adam(std::int64_t warmup, Scale scale = Scale::kL1,
                                      bool bias_correction = true) {
  return {plain_every_step(warmup), plain_every_step(), scale, bias_correction, true, true};
}

/// Data-parallel AdamW is a dense refresh in every step, so it never comes to a sync.
inline PlainRecipe plain_adamw(bool bias_correction = true) {
  return {plain_every_step(), plain_every_step(), Scale::kL1, bias_correction, false, false};
}

inline Recipe library_recipe(const PlainRecipe& plain) {
  const CodePtr dense = plain.dense == DType::kFloat32 ? identity_code() : half_code(plain.dense);
  if (plain.sums_momentum)
    return one_bit_adam(plain.refresh.until, plain.scale, plain.bias_correction, dense);
  if (!plain.births) return adamw(plain.bias_correction, dense);
  return zero_one_adam(library_schedule(plain.refresh), library_schedule(plain.sync), plain.scale,
                       plain.bias_correction, dense);
}

template <typename T>
testing::AssertionResult same_bytes(const T* actual, const T* expected, std::size_t n) {
  if (n == 0 || std::memcmp(actual, expected, n * sizeof(T)) == 0)
    return testing::AssertionSuccess();
  std::size_t i = 0;
  while (std::memcmp(actual + i, expected + i, sizeof(T)) == 0) ++i;
  return testing::AssertionFailure()
         << "element " << i << " of " << n << " is " << testing::PrintToString(actual[i])
         << ", expected " << testing::PrintToString(expected[i]);
}

struct Place {
  std::size_t group, element;
};

struct Problem {
  PlainRecipe recipe;
  std::vector<std::vector<std::int64_t>> groups;  // elements of each tensor
  int world = 1;
  DType dtype = DType::kFloat32;
  DType gradient_dtype = DType::kFloat32;
  int threads = 1;
  /// Coordinates without gradient, or with a late one, and null gradients on some ranks.
  bool holes = true;
  /// Where a rank's gradient is not finite.
  std::function<std::optional<Place>(std::int64_t draw, int rank)> nonfinite = {};
};

/// The same problem solved by the library and by the twin.
class Trial {
 public:
  struct Rank {
    std::unique_ptr<SpyCommunicator> communicator;
    std::unique_ptr<Engine> engine;
    std::vector<std::vector<std::byte>> parameters;  // [group], tensors one behind the other
    std::vector<std::vector<std::byte>> gradients;
    std::vector<Tensor> tensors;
  };

  explicit Trial(Problem problem)
      : problem_(std::move(problem)),
        twin_(problem_.recipe, problem_.groups, problem_.world, initial(0)) {
    for (int r = 0; r < problem_.world; ++r) {
      Rank& rank = ranks_.emplace_back();
      std::vector<std::vector<float>> values = initial(r);  // rank 0's become everyone's
      for (const std::vector<float>& v : values)
        rank.parameters.push_back(encode(v, problem_.dtype));
      rank.gradients.resize(problem_.groups.size());
    }
    start(true);
    expect_equal();
  }

  /// One step of both with the gradients of draw `draw`, compared.
  StepKind step(std::int64_t draw, const std::vector<GroupOptions>& options) {
    SCOPED_TRACE("step with draw " + std::to_string(draw));
    this->draw(draw);
    const StepKind announced = ranks_[0].engine->next_step(options);
    const StepKind expected = twin_.step(gradients_, options);
    EXPECT_EQ(step_library(options), expected);
    if (expected != StepKind::kSkipped) {
      EXPECT_EQ(announced, expected);
    }
    ++counts_[static_cast<std::size_t>(expected)];
    expect_equal();
    return expected;
  }

  /// A sync by call of both, compared. Whether there was anything to send.
  bool sync(const std::vector<GroupOptions>& options) {
    SCOPED_TRACE("sync by call");
    const bool expected = twin_.sync(options);
    run([&](Rank& rank) {
      rank.engine->sync(*rank.communicator, rank.tensors, options, problem_.threads);
    });
    calls_ += expected;
    expect_equal();
    return expected;
  }

  /// Fills the gradients: a signal and each rank's noise, of another magnitude for each tensor.
  void draw(std::int64_t draw) {
    gradients_.assign(ranks_.size(), {});
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      std::size_t tensor = 0;
      for (std::size_t g = 0; g < problem_.groups.size(); ++g) {
        std::vector<float>& values = gradients_[r].emplace_back();
        std::vector<bool> null;
        for (const std::int64_t n : problem_.groups[g]) {
          const std::uint64_t key = mix(mix(static_cast<std::uint64_t>(draw) * 1000 + r) + tensor);
          null.push_back(problem_.holes && key % 6 == 0);
          append_gradient(tensor, n, draw, key, null.back(), values);
          ++tensor;
        }
        for (float& x : values) x = nearest(x, problem_.gradient_dtype);
        const auto place =
            problem_.nonfinite ? problem_.nonfinite(draw, static_cast<int>(r)) : std::nullopt;
        if (place && place->group == g) {
          values[place->element] = draw % 2 == 0 ? NAN : INFINITY;
          null.assign(null.size(), false);
        }
        rank.gradients[g] = encode(values, problem_.gradient_dtype);
        point(rank, g, null);
      }
    }
  }

  StepKind step_library(const std::vector<GroupOptions>& options) {
    std::vector<StepKind> kinds(ranks_.size());
    run([&](Rank& rank) {
      kinds[static_cast<std::size_t>(rank.communicator->rank())] =
          rank.engine->step(*rank.communicator, rank.tensors, options, problem_.threads);
    });
    for (const StepKind kind : kinds) EXPECT_EQ(kind, kinds[0]);
    return kinds[0];
  }

  template <typename Body>
  void run(const Body& body) {
    run_ranks(*group_, problem_.world, [&](int r) { body(ranks_[static_cast<std::size_t>(r)]); });
  }

  /// All state, parameters and counters of all ranks are those of the twin.
  void expect_equal() const {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      for (std::size_t g = 0; g < twin_.slabs(); ++g) {
        SCOPED_TRACE("group " + std::to_string(g));
        const Twin<float>::Slab& s = twin_.slab(g);
        expect_vector(r, "anchor", g, s.a);
        expect_vector(r, "exp_avg", g, s.m[r]);
        expect_vector(r, "exp_avg_sq", g, s.v);
        // Looking at u makes the engine complete it, which it need not be: look at it now and then.
        if (twin_.counters().step % 3 == 0) expect_vector(r, "accumulated", g, s.u[r]);
        expect_vector(r, "worker_error", g, s.worker_error[r]);
        expect_vector(r, "server_error", g, own_chunk(g, r));
        const std::vector<std::byte> x = encode(s.x[r], problem_.dtype);
        EXPECT_TRUE(same_bytes(ranks_[r].parameters[g].data(), x.data(), x.size())) << "parameters";
      }
      Counters counters = ranks_[r].engine->counters();
      // Where a schedule of fixed steps stands before its first event is its own affair.
      if (counters.refresh.index == 0) counters.refresh.next = twin_.counters().refresh.next;
      if (counters.sync.index == 0) counters.sync.next = twin_.counters().sync.next;
      EXPECT_EQ(counters, twin_.counters());
    }
  }

  /// What the engines counted is what happened, in the closed form of docs/arithmetic.md,
  /// "Message", and what was handed to the communicator. Not after skipped steps with an exchange,
  /// which stop half way.
  void expect_accounts() const {
    std::int64_t one_bit = 40, dense = 40, parameters = 0;
    for (std::size_t g = 0; g < twin_.slabs(); ++g) {
      one_bit += twin_.slab(g).layout.one_bit_bytes();
      dense += twin_.slab(g).layout.dense_bytes(problem_.recipe.dense);
      parameters += twin_.slab(g).layout.numel;
    }
    const std::int64_t syncs = count(StepKind::kSync) + calls_;
    const std::int64_t bytes =
        2 * (problem_.world - 1) * (count(StepKind::kRefresh) * dense + syncs * one_bit);
    const std::int64_t steps =
        count(StepKind::kLocal) + count(StepKind::kSync) + count(StepKind::kRefresh);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const Stats& stats = ranks_[r].engine->stats();
      EXPECT_EQ(stats.bytes_sent, bytes);
      EXPECT_EQ(stats.bytes_received, bytes);
      EXPECT_EQ(ranks_[r].communicator->bytes_sent() - sent_before_[r], bytes);
      EXPECT_EQ(stats.parameters, parameters);
      EXPECT_EQ(stats.steps, steps);
      EXPECT_EQ(stats.refreshes, count(StepKind::kRefresh));
      EXPECT_EQ(stats.syncs, syncs);
      EXPECT_EQ(stats.rounds, stats.refreshes + stats.syncs);
      EXPECT_EQ(stats.skipped_steps, count(StepKind::kSkipped));
    }
  }

  /// Saves, forgets everything, and goes on in new engines, communicators and parameters.
  void restart(const std::vector<GroupOptions>& options) {
    std::vector<std::vector<std::byte>> saved;
    for (Rank& rank : ranks_) {
      saved.push_back(rank.engine->save());
      for (std::vector<std::byte>& p : rank.parameters)
        std::fill(p.begin(), p.end(), std::byte{0x41});
      rank.engine.reset();
      rank.communicator.reset();
    }
    start(false);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].engine->load(saved[r]);
      ranks_[r].engine->write_parameters(ranks_[r].tensors, options);
      EXPECT_EQ(ranks_[r].engine->save(), saved[r]);
    }
    expect_equal();
  }

  /// Bytes that the rank's communicator was handed before the first step.
  std::int64_t sent_before(int r) const { return sent_before_[static_cast<std::size_t>(r)]; }
  std::int64_t count(StepKind kind) const { return counts_[static_cast<std::size_t>(kind)]; }
  Rank& rank(int r) { return ranks_[static_cast<std::size_t>(r)]; }
  int world() const { return problem_.world; }
  ThreadGroup& group() { return *group_; }
  const Twin<float>& twin() const { return twin_; }
  const Twin<float>::Gradients& gradients() const { return gradients_; }
  const std::vector<std::vector<std::int64_t>>& groups() const { return problem_.groups; }

  /// The library's vector of one rank and group.
  std::vector<float> vector(int r, std::string_view name, std::size_t g) const {
    const float* values =
        ranks_[static_cast<std::size_t>(r)].engine->vector(name, static_cast<std::int64_t>(g));
    return {values, values + twin_.slab(g).layout.numel};
  }

  /// The part of the group's vector `server_error` that this rank holds.
  std::vector<float> own_chunk(std::size_t g, std::size_t r) const {
    const Twin<float>::Slab& s = twin_.slab(g);
    const std::int64_t begin =
        std::min(s.layout.numel, static_cast<std::int64_t>(r) * s.layout.chunk);
    const std::int64_t end = std::min(s.layout.numel, begin + s.layout.chunk);
    return {s.server_error.begin() + begin, s.server_error.begin() + end};
  }

 private:
  std::vector<std::vector<float>> initial(int rank) const {
    std::vector<std::vector<float>> values;
    for (const std::vector<std::int64_t>& group : problem_.groups) {
      std::vector<float>& x = values.emplace_back();
      const std::int64_t n = Layout(group, problem_.world).numel;
      for (std::int64_t i = 0; i < n; ++i) {
        const float value = 0.1F * noise(static_cast<std::uint64_t>(1'000'000 * (rank + 1) + i));
        x.push_back(nearest(value, problem_.dtype));
      }
    }
    return values;
  }

  static std::vector<std::byte> encode(const std::vector<float>& values, DType dtype) {
    std::vector<std::byte> bytes(values.size() * size_of(dtype));
    if (values.empty()) return bytes;
    if (dtype == DType::kFloat32) {
      std::memcpy(bytes.data(), values.data(), bytes.size());
    } else {
      std::vector<std::uint16_t> bits;
      for (const float x : values) bits.push_back(to_16_bits(x, dtype));
      std::memcpy(bytes.data(), bits.data(), bytes.size());
    }
    return bytes;
  }

  void append_gradient(std::size_t tensor, std::int64_t n, std::int64_t draw, std::uint64_t key,
                       bool null, std::vector<float>& values) const {
    constexpr std::array<float, 4> kMagnitudes{1.0F, 1e-3F, 0.1F, 10.0F};
    const float magnitude = kMagnitudes[tensor % kMagnitudes.size()];
    for (std::int64_t i = 0; i < n; ++i) {
      const bool dead = problem_.holes && n > 1 && i % 7 == 3;
      const bool late = problem_.holes && n > 1 && i % 11 == 5 && draw <= 6;
      const float signal = noise(static_cast<std::uint64_t>(i) + 77 * tensor);
      const float x = magnitude * (0.5F * signal + noise(key + static_cast<std::uint64_t>(i)));
      values.push_back(null || dead || late ? 0.0F : x);
    }
  }

  // Points the tensors of group g at their memory.
  void point(Rank& rank, std::size_t g, const std::vector<bool>& null) {
    std::size_t tensor = 0, begin = 0;
    for (std::size_t before = 0; before < g; ++before) tensor += problem_.groups[before].size();
    for (std::size_t j = 0; j < problem_.groups[g].size(); ++j) {
      const auto n = static_cast<std::size_t>(problem_.groups[g][j]);
      Tensor& t = rank.tensors[tensor + j];
      t.dtype = problem_.dtype;
      t.gradient_dtype = problem_.gradient_dtype;
      t.data = n == 0 ? nullptr : rank.parameters[g].data() + begin * size_of(t.dtype);
      t.gradient = n == 0 || null[j] ? nullptr
                                     : rank.gradients[g].data() + begin * size_of(t.gradient_dtype);
      begin += n;
    }
  }

  void start(bool broadcast) {
    group_ = std::make_unique<ThreadGroup>(problem_.world, kPatience);
    std::vector<std::vector<TensorSpec>> specs;
    std::size_t tensors = 0;
    for (const std::vector<std::int64_t>& group : problem_.groups) {
      specs.emplace_back();
      for (const std::int64_t n : group)
        specs.back().push_back({"tensor " + std::to_string(tensors++), n});
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      rank.communicator = std::make_unique<SpyCommunicator>(*group_, static_cast<int>(r));
      rank.engine = std::make_unique<Engine>(library_recipe(problem_.recipe), specs);
      rank.tensors.assign(tensors, {});
      for (std::size_t g = 0; g < problem_.groups.size(); ++g) {
        point(rank, g, std::vector<bool>(problem_.groups[g].size(), true));
      }
    }
    run([&](Rank& rank) {
      rank.engine->attach(*rank.communicator, rank.tensors, {}, broadcast, {}, problem_.threads);
    });
    sent_before_.clear();
    for (const Rank& rank : ranks_) sent_before_.push_back(rank.communicator->bytes_sent());
    counts_ = {};
    calls_ = 0;
  }

  void expect_vector(std::size_t r, std::string_view name, std::size_t g,
                     const std::vector<float>& expected) const {
    if (expected.empty()) return;
    // An algorithm without a lossy code has no residuals, nor u.
    const float* actual = ranks_[r].engine->vector(name, static_cast<std::int64_t>(g));
    const std::vector<float> zeros(actual == nullptr ? expected.size() : 0);
    EXPECT_TRUE(
        same_bytes(actual == nullptr ? zeros.data() : actual, expected.data(), expected.size()))
        << name;
  }

  Problem problem_;
  Twin<float> twin_;
  std::unique_ptr<ThreadGroup> group_;
  std::vector<Rank> ranks_;
  Twin<float>::Gradients gradients_;
  std::vector<std::int64_t> sent_before_;
  std::array<std::int64_t, 4> counts_{};
  std::int64_t calls_ = 0;
};

}  // namespace zeroone::test
