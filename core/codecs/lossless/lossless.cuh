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

// What a table of 4096 bytes does with four digits: those that a mask of 4 bits has are moved side
// by side, or back to their places. Row: mask << 8 | digits.
struct alignas(16) QuadTable {
  std::uint8_t rows[4096];
};

template <bool kBack>
constexpr QuadTable make_quad_table() {
  QuadTable table{};
  for (int row = 0; row < 4096; ++row)
    for (int place = 0, beside = 0; place < 4; ++place) {
      if (!(row >> (8 + place) & 1)) continue;
      const int from = kBack ? beside : place, to = kBack ? place : beside;
      table.rows[row] |= (row >> 2 * from & 3) << 2 * to;
      ++beside;
    }
  return table;
}
__device__ constexpr QuadTable kGather = make_quad_table<false>();
__device__ constexpr QuadTable kSpread = make_quad_table<true>();

// Into shared memory, by all threads.
__device__ inline void load(const QuadTable& table, QuadTable& shared) {
  static_assert(sizeof table == kThreads * sizeof(uint4));
  reinterpret_cast<uint4*>(&shared)[threadIdx.x] =
      reinterpret_cast<const uint4*>(&table)[threadIdx.x];
}

// Of a thread's 16 values those that threes() found, four by four.
struct Quads {
  std::uint32_t even, odd;  // masks of quads 0 and 2, 1 and 3, in halves of 16 bits
  std::uint32_t begins;     // bits of digits in front of each, a byte each

  __device__ explicit Quads(std::uint32_t threes) {
    const std::uint32_t pairs = (threes | threes >> 1) & 0x33333333u, masks = pairs | pairs >> 2;
    even = masks & 0x000F000Fu;
    odd = masks >> 8 & 0x000F000Fu;
    const std::uint32_t two = (threes & 0x11111111u) + (threes >> 2 & 0x11111111u);
    begins = (two + (two >> 4) & 0x0F0F0F0Fu) * 0x02020200u;
  }
  __device__ int begin(int quad) const { return begins >> 8 * quad & 255; }
  // Of the digits in a byte of `word`.
  __device__ std::uint32_t row(int quad, std::uint32_t word, int byte) const {
    return __byte_perm(word, quad % 2 ? odd : even, (quad < 2 ? 0x5540 : 0x5560) | byte);
  }
};

// The digits of `word` at the places that `quads` has, side by side; and back.
__device__ inline std::uint32_t gather_digits(std::uint32_t word, const Quads& quads,
                                              const QuadTable& table) {
  std::uint32_t found = 0;
#pragma unroll
  for (int quad = 0; quad < 4; ++quad)
    found |= std::uint32_t{table.rows[quads.row(quad, word, quad)]} << quads.begin(quad);
  return found;
}
__device__ inline std::uint32_t spread_digits(std::uint32_t word, const Quads& quads,
                                              const QuadTable& table) {
  std::uint32_t found[4];
#pragma unroll
  for (int quad = 0; quad < 4; ++quad)
    found[quad] = table.rows[quads.row(quad, word >> quads.begin(quad), 0)];
  return __byte_perm(__byte_perm(found[0], found[1], 0x7740),
                     __byte_perm(found[2], found[3], 0x7740), 0x5410);
}

// A rank's digits in the planes, a byte for each.
__device__ inline std::uint32_t digits_of(int rank) {
  std::uint32_t digits = 0;
#pragma unroll
  for (int p = 0; p < kPlanes; ++p)
    digits |= static_cast<std::uint32_t>(min(max(rank - 3 * p, 0), 3)) << 8 * p;
  return digits;
}

// The exponents in a word, and the lowest bit of each.
template <class T>
inline constexpr std::uint32_t kExponents = std::is_same_v<T, float>  ? 0x7F800000u
                                            : std::is_same_v<T, Half> ? 0x7C007C00u
                                                                      : 0x7F807F80u;
template <class T>
inline constexpr std::uint32_t kLowest = kExponents<T> & ~(kExponents<T> << 1);

// Of value i in a thread's words.
template <class T>
__device__ inline std::uint32_t exponent_at(const std::uint32_t (&words)[kWords<T>], int i) {
  if constexpr (std::is_same_v<T, float>) return words[i] >> 23 & 255;
  const std::uint32_t value = words[i / 2] >> 16 * (i % 2);
  return std::is_same_v<T, Half> ? value >> 10 & 31 : value >> 7 & 255;
}

// Sign and mantissa as a byte, of four values whose upper 16 bits are the halves of two words; and
// back, of the values 2 * pair and 2 * pair + 1.
__device__ inline std::uint32_t rest_of_quad(std::uint32_t first, std::uint32_t second) {
  return (__byte_perm(first, second, 0x7531) & 0x80808080u) |
         (__byte_perm(first, second, 0x6420) & 0x7F7F7F7Fu);
}
__device__ inline std::uint32_t pair_of_rest(std::uint32_t rest, int pair) {
  return __byte_perm(rest, 0, pair % 2 ? 0x3322 : 0x1100) & 0x807F807Fu;
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
        if constexpr (std::is_same_v<T, float>) {
          const std::uint32_t* const four = words + 4 * i;
          bytes[i] = rest_of_quad(__byte_perm(four[0], four[1], 0x7632),
                                  __byte_perm(four[2], four[3], 0x7632));
          lower[2 * i] = __byte_perm(four[0], four[1], 0x5410);
          lower[2 * i + 1] = __byte_perm(four[2], four[3], 0x5410);
        } else {
          bytes[i] = rest_of_quad(words[2 * i], words[2 * i + 1]);
        }
      }
    }
  }

  // Values without their exponents.
  __device__ void give(std::uint32_t (&words)[kWords<T>]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // of values 2i and 2i + 1
      if constexpr (std::is_same_v<T, Half>) {
        const std::uint32_t two = __byte_perm(bytes[i / 2], 0, i % 2 ? 0x4342 : 0x4140);
        const std::uint32_t high = pairs >> 4 * i, sign = signs >> 2 * i;
        words[i] = two | (high & 3) << 8 | (high & 12) << 22 | (sign & 1) << 15 | (sign & 2) << 30;
      } else if constexpr (std::is_same_v<T, float>) {
        const std::uint32_t upper = pair_of_rest(bytes[i / 2], i);
        words[2 * i] = __byte_perm(lower[i], upper, 0x5410);
        words[2 * i + 1] = __byte_perm(lower[i], upper, 0x7632);
      } else {
        words[i] = pair_of_rest(bytes[i / 2], i);
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

// A count of each warp, at most kBlock in all.
struct alignas(16) OfWarps {
  std::uint16_t counts[kWarps];
};
static_assert(sizeof(OfWarps) == sizeof(uint4));

// Which warps are in front of this one: a byte for each, 1 or 0.
struct InFront {
  std::uint32_t low, high;

  __device__ InFront() {
    const unsigned int warp = threadIdx.x / kLanes;
    low = warp < 4 ? (1u << 8 * warp) - 1 & kOnes : kOnes;
    high = warp < 4 ? 0 : (1u << 8 * (warp - 4)) - 1 & kOnes;
  }
  __device__ int before(const OfWarps& of, std::uint32_t own) const {
    return static_cast<int>(sum(of, low, high, own));
  }
  __device__ static int all(const OfWarps& of) {
    return static_cast<int>(sum(of, kOnes, kOnes, 0));
  }

 private:
  static constexpr std::uint32_t kOnes = 0x01010101u;
  __device__ static std::uint32_t sum(const OfWarps& of, std::uint32_t low, std::uint32_t high,
                                      std::uint32_t start) {
    const uint4 two = reinterpret_cast<const uint4&>(of);
    return __dp2a_hi(two.w, high,
                     __dp2a_lo(two.z, high, __dp2a_hi(two.y, low, __dp2a_lo(two.x, low, start))));
  }
};

// What the lanes up to this one have.
__device__ inline std::uint32_t sum_of_lanes(std::uint32_t mine) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2)  // adds where there is such a lane
    asm volatile(
        "{\n\t.reg .u32 other;\n\t.reg .pred there;\n\t"
        "shfl.sync.up.b32 other|there, %0, %1, 0, -1;\n\t@there add.u32 %0, %0, other;\n\t}"
        : "+r"(mine)
        : "r"(step));
  return mine;
}

__device__ inline void prefetch(const std::byte* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

}  // namespace cccl::lossless
