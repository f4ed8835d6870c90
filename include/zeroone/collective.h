// Collectives: how messages of all ranks become one. A collective never knows what its bytes mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "zeroone/communicator.h"

namespace zeroone {

/// What a collective carries. All bodies of one round have the same size; headers have the same size in every round.
class Payload {
 public:
  virtual ~Payload() = default;
  virtual std::size_t header_bytes() const = 0;
  virtual std::size_t body_bytes() const = 0;

  /// Looks at the headers of all ranks (rank order). Throws if their bodies must not be combined; false: all ranks say
  /// in their headers that there is nothing to combine.
  virtual bool inspect(const std::byte* headers) = 0;

  /// Makes this rank's contribution to the result, a header and a body, from the bodies that all ranks sent it.
  virtual void combine(const std::byte* bodies, std::byte* contribution) = 0;

  /// Looks at the result: the contributions of all ranks, in rank order. Throws if it is not usable.
  virtual void inspect_result(const std::byte* result) = 0;
};

/// Wire memory of a round and what has been sent through it.
struct Wire {
  Buffer headers;  // twice size() headers: those to send, those received
  Buffer send;     // size() bodies: one for each rank
  Buffer receive;  // size() bodies, or size() contributions; and one contribution behind
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

/// All-to-all, combine, all-gather: a rank sends 2 (W - 1) headers and bodies. The headers of the first phase go ahead of
/// their bodies: ranks that have come to rounds of different sizes learn it before a transport could choke on them. The
/// result is the same bytes on every rank.
CollectivePtr two_phase_collective();

}  // namespace zeroone
