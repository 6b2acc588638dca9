// Small integers to floats by the tensor cores, four in each lane at once. Kernels that read codes are
// bound by instructions; this takes a third of them.
#pragma once

#include <cstdint>

namespace cccl::cuda {

// A diagonal 8 x 8 matrix of a float16 number, as the second factor of widen().
__device__ inline std::uint32_t diagonal_of(std::uint32_t half) {
  const int lane = static_cast<int>(threadIdx.x % 32), row = lane % 4 * 2, column = lane / 4;
  std::uint32_t pair = row == column ? half : row + 1 == column ? half << 16 : 0;
  asm volatile("" : "+r"(pair));  // not to be worked out anew in every loop
  return pair;
}

struct HalfPairs {
  std::uint32_t first, second;
};

// a and b, c and d: the halves of a pair times the diagonal's number, plus `bias`. All lanes of the
// warp take part. Exact if the results are integers below 2^11: the other products are 0, and sums
// of several keep more bits than that.
__device__ inline void widen(HalfPairs pairs, std::uint32_t diagonal, float bias, float& a,
                             float& b, float& c, float& d) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %7, %7, %7};"
      : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
      : "r"(pairs.first), "r"(pairs.second), "r"(diagonal), "f"(bias));
}

// (word & mask) | bits, in one instruction.
__device__ inline std::uint32_t select_or(std::uint32_t word, std::uint32_t mask,
                                          std::uint32_t bits) {
  asm("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(word) : "r"(mask), "r"(bits));
  return word;
}

// PRMT with all modes of its selector.
__device__ inline std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high,
                                              std::uint32_t selector) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

}  // namespace cccl::cuda
