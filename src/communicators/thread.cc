#include "zeroone/thread_communicator.h"

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <span>
#include <vector>

#include "zeroone/error.h"

namespace zeroone {

constexpr std::align_val_t kAlignment{64};

// A barrier that carries one region per rank: each rank publishes, all read, and no one goes on before all have read.
struct ThreadGroup::Shared {
  int size = 1;
  std::chrono::milliseconds timeout{};
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;
  std::int64_t generation = 0;
  std::string aborted;  // empty: not
  std::vector<Region> published;
  std::vector<const char*> operation;

  // Waits until all ranks have arrived. Throws on abort and on timeout (which aborts the others, too).
  void barrier(const char* name, int rank) {
    std::unique_lock lock(mutex);
    fail_if_aborted(name, rank);
    const std::int64_t mine = generation;
    if (++arrived == size) {
      arrived = 0;
      ++generation;
      changed.notify_all();
      return;
    }
    if (!changed.wait_for(lock, timeout, [&] { return generation != mine || !aborted.empty(); })) {
      aborted = "rank " + std::to_string(rank) + " waited " + std::to_string(timeout.count()) + " ms in " + name;
      changed.notify_all();
    }
    if (generation == mine) fail_if_aborted(name, rank);
  }

  void fail_if_aborted(const char* name, int rank) const {
    if (aborted.empty()) return;
    throw CommunicationError(std::string(name) + " failed on rank " + std::to_string(rank) + ": " + aborted);
  }
};

ThreadGroup::ThreadGroup(int size, std::chrono::milliseconds timeout) : shared_(std::make_unique<Shared>()) {
  if (size < 1) throw InvalidArgument("Invalid group size: " + std::to_string(size));
  shared_->size = size;
  shared_->timeout = timeout;
  shared_->published.resize(static_cast<std::size_t>(size));
  shared_->operation.resize(static_cast<std::size_t>(size));
}

ThreadGroup::~ThreadGroup() = default;

void ThreadGroup::abort(const std::string& reason) {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->aborted.empty()) shared_->aborted = reason.empty() ? "aborted" : reason;
  shared_->changed.notify_all();
}

ThreadCommunicator::ThreadCommunicator(ThreadGroup& group, int rank) : group_(group), rank_(rank) {
  if (rank < 0 || rank >= group.shared_->size) {
    throw InvalidArgument("Invalid rank: " + std::to_string(rank) + " in a group of " +
                          std::to_string(group.shared_->size));
  }
}

ThreadCommunicator::~ThreadCommunicator() = default;

int ThreadCommunicator::size() const { return group_.shared_->size; }

void ThreadCommunicator::Free::operator()(std::byte* data) const { ::operator delete(data, kAlignment); }

Buffer ThreadCommunicator::allocate(std::size_t bytes) {
  std::unique_ptr<std::byte, Free> memory(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
  std::memset(memory.get(), 0, bytes);
  const Buffer buffer{next_id_++, memory.get(), bytes};
  buffers_.emplace(buffer.id, std::move(memory));
  return buffer;
}

void ThreadCommunicator::release(const Buffer& buffer) { buffers_.erase(buffer.id); }

template <typename Copy>
Work ThreadCommunicator::exchange(const char* operation, const Region& published, Copy copy) {
  ThreadGroup::Shared& shared = *group_.shared_;
  const auto rank = static_cast<std::size_t>(rank_);
  {
    const std::lock_guard lock(shared.mutex);
    shared.published[rank] = published;
    shared.operation[rank] = operation;
  }
  shared.barrier(operation, rank_);
  // Between the barriers nobody writes what others read.
  for (int j = 0; j < shared.size; ++j) {
    const Region& other = shared.published[static_cast<std::size_t>(j)];
    const char* theirs = shared.operation[static_cast<std::size_t>(j)];
    if (std::strcmp(theirs, operation) != 0 || other.bytes != published.bytes) {
      const std::string reason = "rank " + std::to_string(rank_) + " calls " + operation + " with " +
                                 std::to_string(published.bytes) + " bytes, rank " + std::to_string(j) + " calls " +
                                 theirs + " with " + std::to_string(other.bytes) + " bytes";
      group_.abort(reason);
      throw CommunicationError(reason);
    }
  }
  copy(std::span<const Region>(shared.published));
  shared.barrier(operation, rank_);
  return {};
}

Work ThreadCommunicator::all_to_all(const Region& send, const Region& receive, Stream) {
  const std::size_t part = send.bytes / static_cast<std::size_t>(size());
  return exchange("all_to_all", send, [&](std::span<const Region> sent) {
    for (std::size_t j = 0; j < sent.size(); ++j) {
      std::memcpy(receive.data() + j * part, sent[j].data() + static_cast<std::size_t>(rank_) * part, part);
    }
  });
}

Work ThreadCommunicator::all_gather(const Region& send, const Region& receive, Stream) {
  return exchange("all_gather", send, [&](std::span<const Region> sent) {
    for (std::size_t j = 0; j < sent.size(); ++j) {
      std::memcpy(receive.data() + j * send.bytes, sent[j].data(), send.bytes);
    }
  });
}

Work ThreadCommunicator::broadcast(const Region& region, int root, Stream) {
  return exchange("broadcast", region, [&](std::span<const Region> sent) {
    if (rank_ != root) std::memcpy(region.data(), sent[static_cast<std::size_t>(root)].data(), region.bytes);
  });
}

}  // namespace zeroone
