// The device side of block_float: what a warp does with the blocks of a tile. FORMAT.md.
#pragma once

#include "codecs/block_float/block_float.h"
#include "devices/cuda/body.cuh"

namespace cccl::block_float::on_cuda {

using namespace cccl::cuda;

inline constexpr std::uint32_t kInfinity = 0x7F800000u, kSign = 0x80000000u;
inline constexpr std::uint32_t kTinyScale = 0x0D80;  // 2^-100 as bfloat16: kTiny

// Where codes and scales lie in the body.
struct Layout {
  int log2_block;
  std::uint64_t code_bytes;

  __device__ std::uint64_t scale_offset(std::uint64_t value) const {
    return code_bytes + 2 * (value >> log2_block);
  }
};

// A block's scale, and what its values are multiplied with. A tile has at most 32 blocks: lane b
// looks after block b.
struct Scale {
  std::uint32_t bits;
  float inverse;
  bool is_nan, is_tiny;
};

// 1 / scale, correctly rounded: one Newton step from the approximation is enough for the 8
// significant bits of a bfloat16 (every one of them is tested).
__device__ inline float inverse_of(float scale) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(scale));
  return __fmaf_rn(__fmaf_rn(-scale, guess, 1.0f), guess, guess);
}

// The bits of the largest magnitude of each sign in a block.
struct Extremes {
  std::uint32_t positive, negative;

  __device__ std::uint32_t extreme() const { return max(positive, negative); }
  __device__ std::uint32_t opposite() const { return min(positive, negative); }
};

// The magnitude of the scale max(E * by_extreme, O * by_opposite) * share, with room for kBits.
template <int kBits>
__device__ inline std::uint32_t scale_magnitude(const Extremes& found, float by_extreme,
                                                float by_opposite, float share) {
  const float magnitude = fmaxf(__uint_as_float(found.extreme()) * by_extreme,
                                __uint_as_float(found.opposite()) * by_opposite) *
                          share;
  return max(std::uint32_t{scale_bits(magnitude, kBits)}, min(found.extreme(), 1u));
}

// With its sign. Where it is tiny, the inverse is that of the lifted scale.
__device__ inline Scale make_scale(const Extremes& found, std::uint32_t magnitude, bool is_tiny) {
  Scale scale{kNanScale, 0.0f, found.extreme() >= kInfinity, is_tiny};
  if (scale.is_nan) return scale;
  scale.bits = magnitude | (found.positive > found.negative ? kSign >> 16 : 0);
  const float value = __uint_as_float(scale.bits << 16);
  if (found.extreme() != 0) scale.inverse = inverse_of(is_tiny ? value * kLift : value);
  return scale;
}

template <int kBits, bool kStochastic>
__device__ inline Scale linear_scale(const Extremes& found) {
  constexpr float kHalf = 1 << (kBits - 1);
  constexpr float kReach = kStochastic ? kHalf - 1.0f : kHalf - 0.5f;
  const auto magnitude = scale_magnitude<kBits>(found, 1.0f / kHalf, 1.0f / kReach, 1.0f);
  return make_scale(found, magnitude, found.extreme() != 0 && magnitude < kTinyScale);
}

// The block that a lane's row belongs to spans this many lanes of it, and rows.
template <int kVector, int kBlock>
struct Spread {
  int lanes, rows;
  __device__ explicit Spread(const Layout& layout)
      : lanes(min(kLanes, block(layout) / kVector)),
        rows(max(1, block(layout) / (kLanes * kVector))) {}
  __device__ static int block(const Layout& layout) {
    return kBlock ? kBlock : 1 << layout.log2_block;
  }
};

struct Signed {
  __device__ static std::uint32_t largest(std::uint32_t a, std::uint32_t b) {
    return static_cast<std::uint32_t>(max(static_cast<int>(a), static_cast<int>(b)));
  }
  __device__ static std::uint32_t largest_of_warp(std::uint32_t a) {
    return static_cast<std::uint32_t>(__reduce_max_sync(~0u, static_cast<int>(a)));
  }
};
struct Unsigned {
  __device__ static std::uint32_t largest(std::uint32_t a, std::uint32_t b) { return max(a, b); }
  __device__ static std::uint32_t largest_of_warp(std::uint32_t a) {
    return __reduce_max_sync(~0u, a);
  }
};

// The largest of each block, in all of its lanes and rows.
template <class Order, int kRows, class Spread>
__device__ inline void spread_largest(const Spread& spread, std::uint32_t (&of_rows)[kRows]) {
#pragma unroll
  for (int step = 1; step < kRows; step *= 2) {
    if (step >= spread.rows) break;
    std::uint32_t before[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) before[k] = of_rows[k];
#pragma unroll
    for (int k = 0; k < kRows; ++k) of_rows[k] = Order::largest(before[k], before[k ^ step]);
  }
  if (spread.lanes == kLanes) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) of_rows[k] = Order::largest_of_warp(of_rows[k]);
    return;
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    if (step >= spread.lanes) break;
#pragma unroll
    for (int k = 0; k < kRows; ++k)
      of_rows[k] = Order::largest(of_rows[k], __shfl_xor_sync(~0u, of_rows[k], step));
  }
}

// Codes as the low bits of a float: adding 1.5 * 2^23 + 2^(bits-1) rounds to an integer.
template <int kBits>
struct Rounder {
  static constexpr int kHalf = 1 << (kBits - 1);
  static constexpr float kShift = 0x1.8p23f + kHalf;
  static constexpr std::uint32_t kZeroCode = 0x4B400000;  // the bits of code 0

  __device__ static std::uint32_t limit(float shifted, bool from_below) {
    if (from_below) shifted = fmaxf(shifted, kShift - kHalf);
    return __float_as_uint(fminf(shifted, kShift + kHalf - 1));
  }
};

template <int kBitsOf>
struct Nearest {
  static constexpr int kBits = kBitsOf;
  static constexpr bool kStochastic = false;

  // The codes of a row in one lane, with the bits of kZeroCode above them. Only where the scale met
  // its limit can a code be too small, and at 4 bits not even there.
  template <int kVector>
  __device__ void codes(std::uint64_t, const float* values, float inverse,
                        std::uint32_t (&codes)[kVector]) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      codes[v] = Rounder<kBits>::limit(values[v] * inverse + Rounder<kBits>::kShift, kBits > 4);
  }
};

template <int kBitsOf>
struct Stochastic {
  static constexpr int kBits = kBitsOf;
  static constexpr bool kStochastic = true;
  std::uint64_t seed;

  template <int kVector>
  __device__ void codes(std::uint64_t position, const float* values, float inverse,
                        std::uint32_t (&codes)[kVector]) const {
    const std::uint32_t key = random_key(position, seed);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const auto low = static_cast<std::uint32_t>(position + v);
      const bool carried = low < static_cast<std::uint32_t>(position);
      const std::uint32_t random = mix(mix(low ^ static_cast<std::uint32_t>(seed)) +
                                       (carried ? random_key(position + v, seed) : key));
      const float u = static_cast<float>(random >> 8) * 0x1p-24f;
      codes[v] =
          Rounder<kBits>::limit(__fadd_rd(values[v] * inverse + u, Rounder<kBits>::kShift), true);
    }
  }
};

// kVector codes side by side. The low bits count; the others are those of kZeroCode.
template <int kBits, int kVector>
__device__ inline Chunk<kVector * kBits / 8> pack(const std::uint32_t (&codes)[kVector]) {
  constexpr int kInWord = kVector * kBits < 32 ? kVector : 32 / kBits;
  static_assert(32 % kBits == 0 && kVector % kInWord == 0);
  Chunk<kVector * kBits / 8> packed;
#pragma unroll
  for (int w = 0; w < kVector / kInWord; ++w) {
    // Horner's rule; what the upper bits add up to is the same for all codes.
    std::uint32_t word = 0, upper = 0;
#pragma unroll
    for (int i = kInWord - 1; i >= 0; --i) {
      word = (word << kBits) + codes[w * kInWord + i];
      upper = (upper << kBits) + Rounder<kBits>::kZeroCode;
    }
    packed.words[w] = word - upper;
  }
  return packed;
}

// Makes codes from number `count` on zero.
template <int kBits, int kVector>
__device__ inline void cut(int count, std::uint32_t (&codes)[kVector]) {
#pragma unroll
  for (int v = 0; v < kVector; ++v)
    if (v >= count) codes[v] = Rounder<kBits>::kZeroCode;
}

// Of what the rows have in each lane: that of block lane_id().
template <int kVector, int kRows, class Spread>
__device__ inline std::uint32_t of_own_block(const Spread& spread, int first,
                                             const std::uint32_t (&of_rows)[kRows]) {
  const int source = first / kVector % kLanes, row = first / (kLanes * kVector);
  std::uint32_t own = 0;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const std::uint32_t theirs =
        spread.lanes == kLanes ? of_rows[k] : __shfl_sync(~0u, of_rows[k], source);
    if (row == k) own = theirs;
  }
  return own;
}

// kBlock: the block size where it is known to the compiler, or 0.
template <class Quantiser, int kBlock>
struct Encoder {
  using Values = void;
  using Real = float;
  static constexpr bool kNanBits = false;
  static constexpr int kBits = Quantiser::kBits;
  Layout layout;
  Quantiser quantiser;

  __device__ void prepare() const {}

  template <int kVector, class Tile>
  __device__ bool encode(const Tile& tile, float (&values)[kPerLane], BodyWriter& out) const {
    constexpr int kRows = kPerLane / kVector;
    const int log2_block = kBlock ? std::countr_zero(unsigned{kBlock}) : layout.log2_block;
    const int own = lane_id() << log2_block;  // the first value of block lane_id()
    const Scale scale = scale_of_own_block<kVector>(own, values);
    const auto block_of_row = [&](int k) {
      return (k * kLanes + lane_id()) * kVector >> log2_block;
    };
    if (__any_sync(~0u, scale.is_tiny | scale.is_nan)) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const bool is_nan = __shfl_sync(~0u, scale.is_nan, block_of_row(k));
        const bool is_tiny = __shfl_sync(~0u, scale.is_tiny, block_of_row(k));
#pragma unroll
        for (int v = k * kVector; v < (k + 1) * kVector; ++v)
          values[v] = is_nan ? 0.0f : is_tiny ? values[v] * kLift : values[v];
      }
    }
    Chunk<kVector * kBits / 8> rows[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int at = (k * kLanes + lane_id()) * kVector;
      const float inverse = __shfl_sync(~0u, scale.inverse, block_of_row(k));
      std::uint32_t codes[kVector];
      quantiser.template codes<kVector>(tile.position + at, values + k * kVector, inverse, codes);
      if constexpr (!Tile::kDirect) cut<kBits>(tile.n - at, codes);
      rows[k] = pack<kBits>(codes);
    }
    out.rows(tile, tile.first / 8 * kBits, layout.code_bytes, rows);
    if (own < tile.n) out.half_word(tile, layout.scale_offset(tile.first + own), scale.bits);
    return scale.is_nan;
  }

 private:
  template <int kVector>
  __device__ Scale scale_of_own_block(int own, const float (&values)[kPerLane]) const {
    constexpr int kRows = kPerLane / kVector;
    std::uint32_t positive[kRows], negative[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      positive[k] = 0;
      negative[k] = kSign;  // as unsigned, the largest magnitude of a negative value comes last
#pragma unroll
      for (int v = k * kVector; v < (k + 1) * kVector; ++v) {
        positive[k] = Signed::largest(positive[k], __float_as_uint(values[v]));
        negative[k] = Unsigned::largest(negative[k], __float_as_uint(values[v]));
      }
    }
    const Spread<kVector, kBlock> spread(layout);
    spread_largest<Signed>(spread, positive);
    spread_largest<Unsigned>(spread, negative);
    return linear_scale<kBits, Quantiser::kStochastic>(
        {of_own_block<kVector>(spread, own, positive),
         of_own_block<kVector>(spread, own, negative) & ~kSign});
  }
};

// kNormal4Levels[first + 0 ... 7], byte by byte.
constexpr std::uint64_t eight_levels(int first) {
  std::uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i)
    bytes |= std::uint64_t{static_cast<std::uint8_t>(kNormal4Levels[first + i])} << 8 * i;
  return bytes;
}

__device__ inline float level_of_code(int code) {
  constexpr std::uint64_t kLow = eight_levels(0), kHigh = eight_levels(8);
  return static_cast<std::int8_t>((code & 8 ? kHigh : kLow) >> 8 * (code % 8));
}

template <int kBits, Codebook kCodebook>
struct Decoder {
  using Values = void;
  static constexpr int kVector = kChunkBytes * 8 / kBits;
  static constexpr float kZero = 0.0f;
  Layout layout;

  template <int kVector>
  struct Fetched {
    Chunk<kVector * kBits / 8> rows[kPerLane / kVector];
    std::uint32_t scale;  // of block lane_id()
  };

  template <int kVector, class Tile>
  __device__ Fetched<kVector> fetch(const Tile& tile, BodyReader& in) const {
    Fetched<kVector> fetched;
    const int own = lane_id() << layout.log2_block;
    if (Tile::kDirect && tile.ahead < tile.count) in.prefetch_line(layout.scale_offset(tile.ahead));
    fetched.scale =
        own < tile.n ? in.half_word(tile, layout.scale_offset(tile.first + own)) << 16 : 0;
    in.rows(tile, tile.first / 8 * kBits, layout.code_bytes, fetched.rows);
    return fetched;
  }

  template <int kVector, bool kAdd, class Real>
  __device__ void apply(const Fetched<kVector>& fetched, Real (&values)[kPerLane]) const {
    const float table = level_of_code(lane_id() % 16);  // across the warp
#pragma unroll
    for (int k = 0; k < kPerLane / kVector; ++k) {
      const int block = (k * kLanes + lane_id()) * kVector >> layout.log2_block;
      const float scale = __uint_as_float(__shfl_sync(~0u, fetched.scale, block));
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        Real& value = values[k * kVector + v];
        const float level = level_of<kVector>(fetched.rows[k], v, table);
        // The product is exact: fused or not, the sum is rounded once.
        if constexpr (std::is_same_v<Real, float>)
          value = __fmaf_rn(level, scale, kAdd ? value : 0.0f);
        else
          value = (kAdd ? value : 0.0) + __fmaf_rn(level, scale, 0.0f);
      }
    }
    if (!kAdd && __any_sync(~0u, (fetched.scale & ~kSign) > kInfinity)) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (isnan(values[i])) values[i] = nan_of<Real>();
    }
  }

  // A code at bit p of the mantissa of 2^(23-p) is that number plus the code.
  template <int kVector>
  __device__ static float level_of(const Chunk<kVector * kBits / 8>& codes, int v, float table) {
    constexpr std::uint32_t kMask = (1u << kBits) - 1;
    const int at = v * kBits % 32;
    const std::uint32_t word = codes.words[v * kBits / 32];
    if constexpr (kCodebook == kNormal4) {
      return __shfl_sync(~0u, table, word >> at);  // lane i and i + 16 have the same
    } else if constexpr (kBits == 8) {
      const auto shifted = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 + at / 8));
      return shifted - (0x1p23f + (1 << (kBits - 1)));
    } else {
      static_assert(32 % kBits == 0);
      const int shift = at + kBits > 23 ? 12 : 0, bit = at - shift;
      const std::uint32_t exponent = (127u + 23 - bit) << 23;
      const auto shifted = __uint_as_float((word >> shift & kMask << bit) | exponent);
      return shifted - (__uint_as_float(exponent) + (1 << (kBits - 1)));
    }
  }
};

}  // namespace cccl::block_float::on_cuda
