#include "zeroone/state_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace zeroone {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

void prefer_huge_pages(void* data, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
  // Advice: a refusal changes nothing but speed.
  if (first < last) static_cast<void>(madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE));
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

void StateMemory::Free::operator()(float* data) const { ::operator delete(data, kAlignment); }

float* StateMemory::allocate(std::int64_t numel) {
  const std::int64_t skew = skew_of(blocks_.size());
  const auto floats = static_cast<std::size_t>(numel + skew);
  blocks_.emplace_back(static_cast<float*>(::operator new(std::max<std::size_t>(floats, 1) * sizeof(float), kAlignment)));
  float* data = blocks_.back().get();
  prefer_huge_pages(data, floats * sizeof(float));
  std::fill_n(data, floats, 0.0f);
  return data + skew;
}

}  // namespace zeroone
