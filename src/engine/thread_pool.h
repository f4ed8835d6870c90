// The threads of one engine. They start when first needed and end with the pool.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/function_ref.h"

namespace zeroone {

class ThreadPool {
 public:
  ThreadPool() = default;
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Runs body(begin, end) on contiguous parts of [0, items), on up to `threads` threads, the caller's included. The
  /// body must not throw. It runs in the default floating-point environment: with the caller's flush-to-zero flag the
  /// result would depend on who computes it.
  void parallel_for(std::int64_t items, int threads, FunctionRef<void(std::int64_t, std::int64_t)> body);

 private:
  struct Job {
    const FunctionRef<void(std::int64_t, std::int64_t)>* body = nullptr;
    std::int64_t items = 0;
    int parts = 0;
  };

  void work(int part);
  static void run_part(const Job& job, int part);

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
  Job job_;
  std::int64_t generation_ = 0;
  int running_ = 0;
  bool stop_ = false;
};

}  // namespace zeroone
