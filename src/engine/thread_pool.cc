#include "engine/thread_pool.h"

#include <algorithm>
#include <cfenv>

namespace zeroone {
namespace {

class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_part(const Job& job, int part) {
  const DefaultFloatEnvironment environment;
  const std::int64_t begin = job.items * part / job.parts;
  const std::int64_t end = job.items * (part + 1) / job.parts;
  if (begin < end) (*job.body)(begin, end);
}

void ThreadPool::parallel_for(std::int64_t items, int threads, FunctionRef<void(std::int64_t, std::int64_t)> body) {
  const int parts = static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(items, 1)));
  const Job job{&body, items, parts};
  if (parts > 1) {
    {
      const std::lock_guard lock(mutex_);
      while (static_cast<int>(workers_.size()) < parts - 1) {
        workers_.emplace_back(&ThreadPool::work, this, static_cast<int>(workers_.size()) + 1);
      }
      job_ = job;
      running_ = parts - 1;
      ++generation_;
    }
    start_.notify_all();
  }
  run_part(job, 0);
  if (parts > 1) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
  }
}

void ThreadPool::work(int part) {
  std::int64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || (generation_ != seen && running_ > 0); });
    if (stop_) return;
    seen = generation_;
    const Job job = job_;
    if (part >= job.parts) continue;  // not needed this time
    lock.unlock();
    run_part(job, part);
    lock.lock();
    if (--running_ == 0) done_.notify_all();
  }
}

}  // namespace zeroone
