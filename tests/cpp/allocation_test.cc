// A step allocates nothing after the first of its kind: no temporaries of any size.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "zeroone/zeroone.h"

namespace {

std::atomic<std::int64_t> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace zeroone {
namespace {

void train(int ranks, int threads) {
  constexpr std::size_t kNumel = 10007;
  ThreadGroup group(ranks);
  std::atomic<int> local = 0, refresh = 0, sync = 0;
  std::vector<std::thread> workers;
  for (int rank = 0; rank < ranks; ++rank) {
    workers.emplace_back([&, rank] {
      std::vector<float> data(kNumel, 1.0f), gradient(kNumel);
      for (std::size_t i = 0; i < kNumel; ++i) gradient[i] = std::sin(static_cast<float>(i) + static_cast<float>(rank));
      ThreadCommunicator communicator(group, rank);
      Optimizer optimizer(zero_one_adam(doubling(2), interval(3)), communicator, {{{}, {{"w", data, gradient}}}},
                          threads);
      const auto step = [&] {
        const StepKind kind = optimizer.step();
        ++(kind == StepKind::kLocal ? local : kind == StepKind::kRefresh ? refresh : sync);
      };
      const auto barrier = [&] { optimizer.sync(); };  // all ranks past their first steps
      for (int t = 0; t < 20; ++t) step();
      barrier();
      const std::int64_t before = allocations;
      for (int t = 0; t < 30; ++t) step();
      barrier();
      EXPECT_EQ(allocations, before) << ranks << " ranks, " << threads << " threads";
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_GT(local, 0);
  EXPECT_GT(refresh, 0);
  EXPECT_GT(sync, 0);
}

TEST(AllocationTest, NoneInAStepAfterTheFirst) {
  const std::int64_t before = allocations;
  train(1, 1);
  EXPECT_GT(allocations, before) << "the counter counts";
  train(1, 2);
  train(2, 1);
  train(3, 2);
}

}  // namespace
}  // namespace zeroone
