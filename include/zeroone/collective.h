// Collectives: how messages of all ranks become one. A collective never knows what its bytes mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "zeroone/communicator.h"

namespace zeroone {

/// What a collective carries. The messages of one round all have `message_bytes()` bytes.
class Payload {
 public:
  virtual ~Payload() = default;
  virtual std::size_t message_bytes() const = 0;

  /// Looks at the messages of all ranks to this one (rank order). Throws if they must not be combined; false: all
  /// ranks have agreed in their messages that there is nothing to combine.
  virtual bool inspect(const std::byte* received) = 0;

  /// Makes this rank's contribution to the result from the messages that all ranks sent it.
  virtual void combine(const std::byte* received, std::byte* contribution) = 0;

  /// Looks at the result: the contributions of all ranks, in rank order. Throws if it is not usable.
  virtual void inspect_result(const std::byte* result) = 0;
};

/// Wire memory of a round and what has been sent through it.
struct Wire {
  Buffer send;     // size() messages: one to each rank
  Buffer receive;  // size() messages, and one more: the contribution
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_received = 0;
};

class Collective {
 public:
  virtual ~Collective() = default;
  virtual std::string_view name() const = 0;

  /// Sends what lies in wire.send; the result lies in wire.receive. False: nothing was combined (see inspect).
  virtual bool run(Communicator& communicator, Wire& wire, Payload& payload) const = 0;
};

using CollectivePtr = std::shared_ptr<const Collective>;

/// All-to-all, combine, all-gather: 2 (W - 1) messages per rank. The result is the same bytes on every rank.
CollectivePtr two_phase_collective();

}  // namespace zeroone
