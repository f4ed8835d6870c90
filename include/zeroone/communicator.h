// Communicator: the few byte-level operations through which ranks talk.
//
// An implementation moves bytes and never looks at them. Every operation is a collective: all ranks call the same
// operations with the same sizes in the same order, from one thread at a time. Every wait is bounded by the
// implementation's timeout; a failure throws CommunicationError (or whatever the front end's language throws) and
// leaves the receive regions undefined.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeroone {

class Communicator;

/// Memory that the communicator can send from and receive into. Lives until `release` or the communicator's end.
struct Buffer {
  std::int64_t id = -1;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// A part of a buffer.
struct Region {
  Buffer buffer;
  std::size_t offset = 0;
  std::size_t bytes = 0;

  std::byte* data() const { return buffer.data + offset; }
};

/// Where device work is ordered; opaque to the engine, null on a CPU.
using Stream = void*;

/// Handle of an operation under way. The receive region is valid after `wait()`.
class Work {
 public:
  Work() = default;
  Work(Communicator* communicator, std::int64_t ticket) : communicator_(communicator), ticket_(ticket) {}
  void wait();

 private:
  Communicator* communicator_ = nullptr;  // null: already complete
  std::int64_t ticket_ = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Allocates wire memory of `bytes` > 0 bytes. Not a collective.
  virtual Buffer allocate(std::size_t bytes) = 0;
  virtual void release(const Buffer& buffer) = 0;

  /// Part j of `send` goes to rank j, which finds it as part rank() of its `receive`. Both regions have
  /// size() equal parts.
  virtual Work all_to_all(const Region& send, const Region& receive, Stream stream = nullptr) = 0;

  /// `send` of rank j becomes part j of everyone's `receive`, which has size() * send.bytes bytes.
  virtual Work all_gather(const Region& send, const Region& receive, Stream stream = nullptr) = 0;

  /// `region` of rank `root` overwrites everyone's.
  virtual Work broadcast(const Region& region, int root, Stream stream = nullptr) = 0;

  /// Completes the operation that returned `ticket`; called by Work::wait.
  virtual void wait(std::int64_t ticket) { static_cast<void>(ticket); }
};

inline void Work::wait() {
  if (communicator_ != nullptr) communicator_->wait(ticket_);
  communicator_ = nullptr;
}

}  // namespace zeroone
