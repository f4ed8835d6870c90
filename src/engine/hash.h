// A 64-bit hash for comparing bytes among ranks; not for adversaries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace zeroone {

inline std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed = 0x9e3779b97f4a7c15u) {
  const auto mix = [](std::uint64_t h, std::uint64_t word) {
    h = (h ^ word) * 0xff51afd7ed558ccdu;
    return h ^ (h >> 32);
  };
  std::uint64_t h = mix(seed, bytes);
  const auto* p = static_cast<const unsigned char*>(data);
  for (; bytes >= 8; bytes -= 8, p += 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    h = mix(h, word);
  }
  std::uint64_t rest = 0;
  if (bytes > 0) std::memcpy(&rest, p, bytes);
  return mix(h, rest);
}

}  // namespace zeroone
