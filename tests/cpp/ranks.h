// Ranks as threads of one process, for tests.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "zeroone/thread_communicator.h"

namespace zeroone::test {

/// No test waits longer than this for another rank.
inline constexpr std::chrono::seconds kPatience{120};

/// Runs `body(rank)` in one thread per rank and rethrows the first failure. A rank that fails
/// aborts `group`, so that no other waits for it.
template <typename Body>
void run_ranks(ThreadGroup& group, int size, const Body& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        const std::scoped_lock lock(mutex);
        if (first) return;
        first = std::current_exception();
        group.abort("rank " + std::to_string(rank) + " failed");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

/// What a SpyCommunicator throws on request.
struct PlannedFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A ThreadCommunicator that counts what it is handed for other ranks, and can fail.
class SpyCommunicator : public Communicator {
 public:
  SpyCommunicator(ThreadGroup& group, int rank) : inner_(group, rank) {}

  /// Throws at the operation that comes after `operations` more, before or after its bytes have
  /// travelled.
  void fail_after(int operations, bool after_transfer) {
    remaining_ = operations;
    after_transfer_ = after_transfer;
  }
  void disarm() { remaining_ = -1; }

  std::int64_t bytes_sent() const { return bytes_sent_; }
  std::int64_t operations() const { return operations_; }
  /// What the last two all-to-alls sent, one part for each rank: the headers and bodies of a round.
  const std::vector<std::byte>& headers() const { return headers_; }
  const std::vector<std::byte>& bodies() const { return bodies_; }

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Buffer allocate(std::size_t bytes) override { return inner_.allocate(bytes); }
  void release(const Buffer& buffer) override { inner_.release(buffer); }
  Work all_to_all(const Region& send, const Region& receive, Stream stream) override {
    headers_.swap(bodies_);
    bodies_.assign(send.data(), send.data() + send.bytes);
    return operate(send.bytes / static_cast<std::size_t>(size()),
                   [&] { return inner_.all_to_all(send, receive, stream); });
  }
  Work all_gather(const Region& send, const Region& receive, Stream stream) override {
    return operate(send.bytes, [&] { return inner_.all_gather(send, receive, stream); });
  }
  Work broadcast(const Region& region, int root, Stream stream) override {
    return operate(root == rank() ? region.bytes : 0,
                   [&] { return inner_.broadcast(region, root, stream); });
  }
  void wait(std::int64_t ticket) override { inner_.wait(ticket); }

 private:
  template <typename Operation>
  Work operate(std::size_t bytes_per_peer, const Operation& operation) {
    const bool fails = remaining_ == 0;
    if (remaining_ >= 0) --remaining_;
    if (fails && !after_transfer_) throw PlannedFailure("before the transfer");
    Work work = operation();
    if (fails) throw PlannedFailure("after the transfer");
    bytes_sent_ += static_cast<std::int64_t>(bytes_per_peer) * (size() - 1);
    ++operations_;
    return work;
  }

  ThreadCommunicator inner_;
  std::int64_t bytes_sent_ = 0;
  std::int64_t operations_ = 0;
  std::vector<std::byte> headers_, bodies_;
  int remaining_ = -1;
  bool after_transfer_ = false;
};

}  // namespace zeroone::test
