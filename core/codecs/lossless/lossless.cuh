// A block in the threads of a CUDA thread block, 16 values in each: its digits, and the words of
// its parts in memory.
#pragma once

#include "codecs/lossless/lossless.h"
#include "devices/cuda/finish.cuh"
#include "devices/cuda/words.cuh"

namespace cccl::lossless {

using namespace cuda;

inline constexpr int kPerThread = 16;
static_assert(kThreads * kPerThread == kBlock);

// Words behind the rest, table and plane 0 of a coded block: it is shorter than its values.
inline constexpr int kTailWords = (kBlock - kTable - kBlock / 4) / 4;

template <class T>
inline constexpr int kWords = kPerThread * sizeof(T) / 4;  // of a thread's values

// Where the parts of a coded block of n values begin, and how its rest ends.
template <class T>
struct Places {
  int n, upper, pairs, signs, table, plane, tail;

  __device__ explicit Places(int values) : n(values) {
    const int bytes = (n + 3) / 4 * 4, digits = (n + 15) / 16 * 4;
    upper = std::is_same_v<T, float> ? (2 * n + 3) / 4 * 4 : 0;
    pairs = upper + bytes;
    signs = pairs + digits;
    table = std::is_same_v<T, Half> ? signs + (n + 31) / 32 * 4 : pairs;
    plane = table + kTable;
    tail = plane + digits;
  }
};

// Where the digit is 3: more of that value follow.
__device__ inline std::uint32_t threes(std::uint32_t word) {
  return word & word >> 1 & 0x55555555u;
}

// The digits of `word` at the places that `low` has a bit for, side by side; and back.
__device__ inline std::uint32_t gather_digits(std::uint32_t word, std::uint32_t low) {
  std::uint32_t found = 0;
  for (int at = 0; low; low &= low - 1, at += 2) found |= (word >> (__ffs(low) - 1) & 3) << at;
  return found;
}
__device__ inline std::uint32_t scatter_digits(std::uint32_t word, std::uint32_t low) {
  std::uint32_t found = 0;
  for (; low; low &= low - 1, word >>= 2) found |= (word & 3) << (__ffs(low) - 1);
  return found;
}

// A rank's digits in the planes, two bits for each.
__device__ inline std::uint32_t digits_of(int rank) {
  std::uint32_t digits = 0;
#pragma unroll
  for (int p = 0; p < kPlanes; ++p)
    digits |= static_cast<std::uint32_t>(min(max(rank - 3 * p, 0), 3)) << 2 * p;
  return digits;
}

// Of value i in a thread's words.
template <class T>
__device__ inline std::uint32_t exponent_at(const std::uint32_t (&words)[kWords<T>], int i) {
  if constexpr (std::is_same_v<T, float>) return words[i] >> 23 & 255;
  const std::uint32_t value = words[i / 2] >> 16 * (i % 2);
  return std::is_same_v<T, Half> ? value >> 10 & 31 : value >> 7 & 255;
}

// Sign and mantissa as a byte, of two values in the halves of a word; and back.
__device__ inline std::uint32_t rest_of_pair(std::uint32_t pair) {
  return (pair >> 8 & 0x00800080u) | (pair & 0x007F007Fu);
}
__device__ inline std::uint32_t pair_of_rest(std::uint32_t rest) {
  return (rest & 0x00800080u) << 8 | (rest & 0x007F007Fu);
}

// The parts of a thread's values that are no exponents, in words as they are stored.
template <class T>
struct Rest {
  std::uint32_t bytes[4];      // a byte of each value
  std::uint32_t lower[8];      // float32: the lower halves
  std::uint32_t pairs, signs;  // float16

  __device__ void take(const std::uint32_t (&words)[kWords<T>]) {
    pairs = signs = 0;
    if constexpr (std::is_same_v<T, Half>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) bytes[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x6420);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        pairs |= ((words[i] >> 8 & 3) | (words[i] >> 22 & 12)) << 4 * i;
        signs |= ((words[i] >> 15 & 1) | (words[i] >> 30 & 2)) << 2 * i;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t both[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = 2 * i + half;
          if constexpr (std::is_same_v<T, float>) {
            both[half] = rest_of_pair(__byte_perm(words[2 * at], words[2 * at + 1], 0x7632));
            lower[at] = __byte_perm(words[2 * at], words[2 * at + 1], 0x5410);
          } else {
            both[half] = rest_of_pair(words[at]);
          }
        }
        bytes[i] = __byte_perm(both[0], both[1], 0x6420);
      }
    }
  }

  // Values without their exponents.
  __device__ void give(std::uint32_t (&words)[kWords<T>]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // of values 2i and 2i + 1
      const std::uint32_t two =
          __byte_perm(bytes[i / 2], 0, i % 2 ? 0x4342 : 0x4140);  // a byte in each half
      if constexpr (std::is_same_v<T, Half>) {
        const std::uint32_t high = pairs >> 4 * i, sign = signs >> 2 * i;
        words[i] = two | (high & 3) << 8 | (high & 12) << 22 | (sign & 1) << 15 | (sign & 2) << 30;
      } else if constexpr (std::is_same_v<T, float>) {
        const std::uint32_t upper = pair_of_rest(two);
        words[2 * i] = __byte_perm(lower[i], upper, 0x5410);
        words[2 * i + 1] = __byte_perm(lower[i], upper, 0x7632);
      } else {
        words[i] = pair_of_rest(two);
      }
    }
  }

  // step(offset in the block, words, bytes of them that exist) for each part of thread t.
  template <class Step>
  __device__ void for_parts(const Places<T>& places, int t, Step step) {
    if constexpr (std::is_same_v<T, float>)
      step(32 * t, lower, clamp_bytes(places.upper - 32 * t, 32));
    step(places.upper + 16 * t, bytes, clamp_bytes(places.pairs - places.upper - 16 * t, 16));
    if constexpr (std::is_same_v<T, Half>) {
      std::uint32_t one[1] = {pairs};
      step(places.pairs + 4 * t, one, clamp_bytes(places.signs - places.pairs - 4 * t, 4));
      pairs = one[0];
    }
  }
};

// Sums over a thread block of four counts, each at most kBlock.
struct Counts {
  std::uint32_t low, high;  // two in each, of 16 bits

  __device__ void add(const Counts& other) { low += other.low, high += other.high; }
  __device__ int at(int i) const { return (i < 2 ? low : high) >> 16 * (i % 2) & 0xFFFF; }
};

// What threads in front of this one have, and all have. `sums` is used once between two barriers.
__device__ inline void scan(const Counts& mine, Counts (&sums)[kWarps], Counts& before,
                            Counts& all) {
  Counts upto = mine;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const Counts other{__shfl_up_sync(~0u, upto.low, step), __shfl_up_sync(~0u, upto.high, step)};
    if (lane_id() >= step) upto.add(other);
  }
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  if (lane_id() == kLanes - 1) sums[warp] = upto;
  __syncthreads();
  before = {upto.low - mine.low, upto.high - mine.high};
  all = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before.add(sums[w]);
    all.add(sums[w]);
  }
}

__device__ inline void prefetch(const std::byte* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

}  // namespace cccl::lossless
