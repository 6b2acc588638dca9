#pragma once

#include <cstdint>

namespace cccl {

// The finalizer of splitmix64 (S. Vigna, public domain).
inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace cccl
