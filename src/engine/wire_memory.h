// A communicator's buffer for the length of a scope.
#pragma once

#include "zeroone/communicator.h"

namespace zeroone {

class WireMemory {
 public:
  WireMemory(Communicator& communicator, std::size_t bytes)
      : communicator_(communicator), buffer_(communicator.allocate(bytes)) {}
  ~WireMemory() { communicator_.release(buffer_); }
  WireMemory(const WireMemory&) = delete;
  WireMemory& operator=(const WireMemory&) = delete;

  const Buffer& buffer() const { return buffer_; }

 private:
  Communicator& communicator_;
  Buffer buffer_;
};

}  // namespace zeroone
