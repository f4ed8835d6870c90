// StateMemory: where state vectors live if the caller has no wishes of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zeroone {

/// Asks the system to back [data, data + bytes) with huge pages where it can; call it before the first touch. A step
/// streams through six vectors at once, and small pages cost it a tenth of its speed (measured).
void prefer_huge_pages(void* data, std::size_t bytes);

/// Elements by which the k-th of several large vectors should be shifted: vectors that all start at the same offset
/// within a page make loads wait for stores to other vectors (measured: a tenth again).
constexpr std::int64_t skew_of(std::size_t k) { return static_cast<std::int64_t>(k % 8) * 80; }

/// Zeroed vectors, aligned to 64 bytes, that live as long as this object.
class StateMemory {
 public:
  float* allocate(std::int64_t numel);

 private:
  struct Free {
    void operator()(float* data) const;
  };
  std::vector<std::unique_ptr<float, Free>> blocks_;
};

}  // namespace zeroone
