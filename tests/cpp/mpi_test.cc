// MpiCommunicator against ThreadCommunicator. Every rank of an mpiexec runs all tests.
#include "zeroone/mpi_communicator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "ranks.h"
#include "zeroone/error.h"
#include "zeroone/zeroone.h"

namespace zeroone::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::byte pattern(int from, int to, std::size_t i) { return std::byte(31 * from + 7 * to + 3 * static_cast<int>(i)); }

class Wired {
 public:
  Wired(Communicator& communicator, std::size_t bytes)
      : communicator_(communicator), buffer_(communicator.allocate(bytes)) {
    std::memset(buffer_.data, 0, bytes);
  }
  ~Wired() { communicator_.release(buffer_); }

  Region region(std::size_t offset, std::size_t bytes) const { return {buffer_, offset, bytes}; }

 private:
  Communicator& communicator_;
  Buffer buffer_;
};

TEST(MpiCommunicator, AllToAllMovesPartJToRankJ) {
  MpiCommunicator communicator(MPI_COMM_WORLD);
  const int rank = communicator.rank();
  const auto ranks = static_cast<std::size_t>(communicator.size());
  for (const std::size_t part : {1, 40, 1003}) {
    const Wired send(communicator, 3 + ranks * part);
    const Wired receive(communicator, 5 + ranks * part);
    const Region from = send.region(3, ranks * part);
    const Region to = receive.region(5, ranks * part);
    for (std::size_t k = 0; k < from.bytes; ++k) from.data()[k] = pattern(rank, static_cast<int>(k / part), k % part);
    communicator.all_to_all(from, to, nullptr).wait();
    for (std::size_t k = 0; k < to.bytes; ++k) {
      ASSERT_EQ(to.data()[k], pattern(static_cast<int>(k / part), rank, k % part)) << part << ", " << k;
    }
  }
}

TEST(MpiCommunicator, AllGatherOrdersByRank) {
  MpiCommunicator communicator(MPI_COMM_WORLD);
  const auto ranks = static_cast<std::size_t>(communicator.size());
  for (const std::size_t part : {1, 40, 1003}) {
    const Wired send(communicator, part);
    const Wired receive(communicator, 1 + ranks * part);
    const Region from = send.region(0, part);
    const Region to = receive.region(1, ranks * part);
    for (std::size_t k = 0; k < part; ++k) from.data()[k] = pattern(communicator.rank(), 0, k);
    communicator.all_gather(from, to, nullptr).wait();
    for (std::size_t k = 0; k < to.bytes; ++k) {
      ASSERT_EQ(to.data()[k], pattern(static_cast<int>(k / part), 0, k % part)) << part << ", " << k;
    }
  }
}

TEST(MpiCommunicator, BroadcastFromEveryRoot) {
  MpiCommunicator communicator(MPI_COMM_WORLD);
  const Wired wired(communicator, 100'003);
  const Region region = wired.region(2, 100'001);
  for (int root = 0; root < communicator.size(); ++root) {
    for (std::size_t k = 0; k < region.bytes; ++k) region.data()[k] = pattern(communicator.rank(), 1, k);
    communicator.broadcast(region, root, nullptr).wait();
    for (std::size_t k = 0; k < region.bytes; ++k) ASSERT_EQ(region.data()[k], pattern(root, 1, k)) << root << ", " << k;
  }
}

TEST(MpiCommunicator, SeveralOperationsAreUnderWayAtOnce) {
  MpiCommunicator communicator(MPI_COMM_WORLD);
  const Wired wired(communicator, 3);
  std::vector<Work> works;
  for (std::size_t k = 0; k < 3; ++k) {
    *wired.region(k, 1).data() = pattern(communicator.rank(), 2, k);
    works.push_back(communicator.broadcast(wired.region(k, 1), 0, nullptr));
  }
  while (!works.empty()) {
    works.back().wait();
    works.pop_back();
  }
  for (std::size_t k = 0; k < 3; ++k) EXPECT_EQ(*wired.region(k, 1).data(), pattern(0, 2, k));
}

TEST(MpiCommunicator, RefusesRegionsThatDoNotFit) {
  MpiCommunicator communicator(MPI_COMM_WORLD);
  const auto ranks = static_cast<std::size_t>(communicator.size());
  const Wired wired(communicator, 100);
  EXPECT_THROW(communicator.all_to_all(wired.region(0, ranks), wired.region(50, 2 * ranks), nullptr), InvalidArgument);
  EXPECT_THROW(communicator.all_gather(wired.region(0, 2), wired.region(50, ranks), nullptr), InvalidArgument);
}

struct Trajectory {
  std::vector<std::vector<float>> parameters;  // at the end
  std::vector<StepKind> kinds;
  Stats stats;
};

// Tensors of odd sizes, drawn to another point on each rank, with deterministic noise.
Trajectory train(const Recipe& recipe, Communicator& communicator) {
  Trajectory result;
  std::vector<std::vector<float>> gradients;
  std::vector<Parameter> parameters;
  for (const std::size_t numel : {7, 1, 5003, 130}) {
    result.parameters.emplace_back(numel, static_cast<float>(1 + communicator.rank()));  // rank 0's win
    gradients.emplace_back(numel);
  }
  for (std::size_t p = 0; p < gradients.size(); ++p) {
    parameters.push_back({"p" + std::to_string(p), result.parameters[p], gradients[p]});
  }
  Optimizer optimizer(recipe, communicator, {{.options = {.lr = 0.01}, .parameters = parameters}});
  std::uint32_t noise = 12345u + static_cast<std::uint32_t>(communicator.rank());
  for (int step = 0; step < 50; ++step) {
    for (std::size_t p = 0; p < gradients.size(); ++p) {
      for (std::size_t i = 0; i < gradients[p].size(); ++i) {
        noise = noise * 1664525u + 1013904223u;
        gradients[p][i] = result.parameters[p][i] - 0.5f * static_cast<float>(communicator.rank()) +
                          static_cast<float>(noise >> 8) * 0x1p-24f;
      }
    }
    result.kinds.push_back(optimizer.step());
  }
  optimizer.sync();
  result.stats = optimizer.stats();
  return result;
}

class MpiTrajectory : public testing::TestWithParam<const char*> {};

TEST_P(MpiTrajectory, EqualsThatOfThreadsBitForBit) {
  const std::string name = GetParam();
  const Recipe recipe = name == "adamw"          ? adamw()
                        : name == "one_bit_adam" ? one_bit_adam(10)
                                                 : zero_one_adam(doubling(3), interval(4));
  MpiCommunicator communicator(MPI_COMM_WORLD);
  const Trajectory actual = train(recipe, communicator);

  std::vector<Trajectory> expected(static_cast<std::size_t>(communicator.size()));
  ThreadGroup group(communicator.size(), kPatience);
  run_ranks(group, communicator.size(), [&](int rank) {
    ThreadCommunicator threads(group, rank);
    expected[static_cast<std::size_t>(rank)] = train(recipe, threads);
  });
  const Trajectory& mine = expected[static_cast<std::size_t>(communicator.rank())];
  EXPECT_EQ(actual.kinds, mine.kinds);
  EXPECT_EQ(actual.stats.bytes_sent, mine.stats.bytes_sent);
  for (std::size_t p = 0; p < mine.parameters.size(); ++p) {
    EXPECT_EQ(std::memcmp(actual.parameters[p].data(), mine.parameters[p].data(), 4 * mine.parameters[p].size()), 0) << p;
    EXPECT_NE(mine.parameters[p][0], 1.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, MpiTrajectory, testing::Values("adamw", "one_bit_adam", "zero_one_adam"));

// The last test: MPI can't give up the operation that nobody completes.
TEST(MpiCommunicatorLast, RankThatStaysAwayMakesTheOthersThrow) {
  constexpr milliseconds kTimeout{2000};
  MpiCommunicator communicator(MPI_COMM_WORLD, kTimeout);
  if (communicator.size() == 1) GTEST_SKIP() << "needs two ranks";
  const int absent = communicator.size() - 1;
  if (communicator.rank() != absent) {
    const auto ranks = static_cast<std::size_t>(communicator.size());
    const Wired wired(communicator, 2 * ranks);
    const Region send = wired.region(0, ranks);
    const Region receive = wired.region(ranks, ranks);
    const auto begin = steady_clock::now();
    try {
      communicator.all_to_all(send, receive, nullptr).wait();
      ADD_FAILURE() << "all_to_all succeeded without rank " << absent;
    } catch (const CommunicationError& error) {
      EXPECT_EQ(std::string(error.what()), "MPI_Ialltoall on rank " + std::to_string(communicator.rank()) + " of " +
                                               std::to_string(ranks) + ": not all ranks answered within 2000 ms");
    }
    const auto waited = steady_clock::now() - begin;
    EXPECT_GE(waited, kTimeout);
    EXPECT_LT(waited, 2 * kTimeout);
    EXPECT_THROW(communicator.all_to_all(send, receive, nullptr), CommunicationError);  // from now on, at once
    EXPECT_LT(steady_clock::now() - begin - waited, kTimeout / 2);
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace zeroone::test

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  testing::InitGoogleTest(&argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) GTEST_FLAG_SET(brief, true);
  const int result = RUN_ALL_TESTS();
  MPI_Finalize();
  return result;
}
