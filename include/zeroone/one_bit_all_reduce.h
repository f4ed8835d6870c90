// OneBitAllReduce: the bare collective. The mean of a vector over all ranks for one bit per element, with error feedback.
//
//   zeroone::OneBitAllReduce collective(communicator, numel);
//   collective.reduce(communicator, values);     // values: numel floats, replaced by the one-bit mean
#pragma once

#include <cstdint>
#include <memory>

#include "zeroone/communicator.h"
#include "zeroone/engine.h"
#include "zeroone/types.h"

namespace zeroone {

class OneBitAllReduce {
 public:
  /// A collective: ranks check that they agree on `numel` (> 0) and `scale`. `allocator` gets the names
  /// "worker_error" (numel floats) and "server_error" (this rank's chunk), group 0.
  OneBitAllReduce(Communicator& communicator, std::int64_t numel, Scale scale = Scale::kL1, Allocator allocator = {});
  ~OneBitAllReduce();

  /// Replaces `values` by the same bytes on every rank. On failure values and residuals are those of before.
  /// A rank whose values are not finite counts as zero; if no rank's are finite, throws InvalidArgument on all.
  void reduce(Communicator& communicator, float* values, int threads = 1);

  float* worker_error() const;
  float* server_error() const;
  std::int64_t chunk_begin() const;  // first element of this rank's chunk
  std::int64_t chunk_numel() const;  // its elements, without padding
  std::int64_t bytes_sent() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroone
