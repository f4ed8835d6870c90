// All ranks in one process, one thread each: for tests, simulation and single-process use.
//
//   zeroone::ThreadGroup group(4);
//   // in thread r: zeroone::ThreadCommunicator communicator(group, r);
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "zeroone/communicator.h"

namespace zeroone {

/// What the ranks of one group share. Outlives its communicators.
class ThreadGroup {
 public:
  /// Throws InvalidArgument if size < 1.
  explicit ThreadGroup(int size, std::chrono::milliseconds timeout = std::chrono::minutes(10));
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  /// Makes every present and later wait of every rank throw CommunicationError with `reason`; thread-safe.
  void abort(const std::string& reason);

 private:
  friend class ThreadCommunicator;
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

/// Rank `rank` of `group`. Blocks on a condition variable, never spins. One thread per communicator.
class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(ThreadGroup& group, int rank);
  ~ThreadCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override;
  Buffer allocate(std::size_t bytes) override;
  void release(const Buffer& buffer) override;
  Work all_to_all(const Region& send, const Region& receive, Stream stream) override;
  Work all_gather(const Region& send, const Region& receive, Stream stream) override;
  Work broadcast(const Region& region, int root, Stream stream) override;

 private:
  template <typename Copy>
  Work exchange(const char* operation, const Region& published, Copy copy);

  struct Free {
    void operator()(std::byte* data) const;
  };

  ThreadGroup& group_;
  int rank_;
  std::int64_t next_id_ = 0;
  std::map<std::int64_t, std::unique_ptr<std::byte, Free>> buffers_;
};

/// A group of one, which owns its ThreadGroup: for a program that has no other ranks.
class LocalCommunicator : private ThreadGroup, public ThreadCommunicator {
 public:
  LocalCommunicator() : ThreadGroup(1), ThreadCommunicator(static_cast<ThreadGroup&>(*this), 0) {}
};

}  // namespace zeroone
