// The device side of block_float: what a warp does with the blocks of a tile. FORMAT.md.
#pragma once

#include <cfloat>

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
// significant bits of a bfloat16 (every one of them is tested). It can be denormal.
__device__ inline float inverse_of(float scale) {
  float guess;
  asm("rcp.approx.f32 %0, %1;" : "=f"(guess) : "f"(scale));
  return __fmaf_rn(__fmaf_rn(-scale, guess, 1.0f), guess, guess);
}

// The bits of the largest magnitude of each sign in a block.
struct Extremes {
  std::uint32_t positive, negative;

  __device__ std::uint32_t extreme() const { return max(positive, negative); }
  __device__ std::uint32_t opposite() const { return min(positive, negative); }
  __device__ Extremes times(float factor) const {
    return {__float_as_uint(__uint_as_float(positive) * factor),
            __float_as_uint(__uint_as_float(negative) * factor)};
  }
};

// The magnitude of the scale max(E * by_extreme, O * by_opposite) * share, with room for `bits`.
__device__ inline std::uint32_t scale_magnitude(const Extremes& found, int bits, float by_extreme,
                                                float by_opposite, float share) {
  const float magnitude = fmaxf(__uint_as_float(found.extreme()) * by_extreme,
                                __uint_as_float(found.opposite()) * by_opposite) *
                          share;
  return max(std::uint32_t{scale_bits(magnitude, bits)}, min(found.extreme(), 1u));
}

// With its sign. Where it is tiny, the inverse is that of the lifted scale.
// `infinity`: what counts as one.
__device__ inline Scale make_scale(const Extremes& found, std::uint32_t magnitude, bool is_tiny,
                                   std::uint32_t infinity) {
  Scale scale{kNanScale, 0.0f, found.extreme() >= infinity, is_tiny};
  if (scale.is_nan) return scale;
  scale.bits = magnitude | (found.positive > found.negative ? kSign >> 16 : 0);
  const float value = __uint_as_float(scale.bits << 16);
  if (found.extreme() != 0) scale.inverse = inverse_of(is_tiny ? value * kLift : value);
  return scale;
}

// Codes are the low bits of a float: adding 1.5 * 2^23 + 2^(bits-1) rounds to an integer.
inline constexpr float kRound = 0x1.8p23f;
inline constexpr std::uint32_t kZeroCode = std::bit_cast<std::uint32_t>(kRound);  // of code 0

// 2^(bits-1), and its distance to what the opposite extreme must reach.
constexpr float half_of(int bits) { return static_cast<float>(1 << (bits - 1)); }
constexpr float reach_of(int bits, bool stochastic) {
  return half_of(bits) - (stochastic ? 1.0f : 0.5f);
}

// The number of bits in a code, where the compiler knows it.
template <int kBitsOf>
struct FixedWidth {
  static constexpr int kBits = kBitsOf;
  __device__ static constexpr int bits() { return kBits; }
  __device__ static constexpr float shift() { return kRound + half_of(kBits); }
  __device__ static constexpr float most() { return kRound + (2 * half_of(kBits) - 1); }
  __device__ static constexpr float by_extreme() { return 1.0f / half_of(kBits); }
  template <bool kStochastic>
  __device__ static constexpr float by_opposite() {
    return 1.0f / reach_of(kBits, kStochastic);
  }
};

template <bool kStochastic, class Width>
__device__ inline Scale linear_scale(const Width& width, const Extremes& found,
                                     std::uint32_t infinity) {
  const auto magnitude = scale_magnitude(found, width.bits(), width.by_extreme(),
                                         width.template by_opposite<kStochastic>(), 1.0f);
  return make_scale(found, magnitude, found.extreme() != 0 && magnitude < kTinyScale, infinity);
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

template <class WidthOf>
struct Nearest {
  using Width = WidthOf;
  static constexpr bool kStochastic = false;
  Width width;

  // Whether a block has values whose codes must be limited: seldom one of each sign's largest.
  __device__ bool exceeds(const Extremes& found, const Scale& scale) const {
    const float inverse = fabsf(scale.inverse);
    return __uint_as_float(found.opposite()) * inverse + width.shift() > width.most() ||
           width.shift() - __uint_as_float(found.extreme()) * inverse < kRound;
  }

  // The codes of a row in one lane, with the bits of kZeroCode above them.
  template <bool kLimited, int kVector>
  __device__ void codes(std::uint64_t, const float* values, float inverse,
                        std::uint32_t (&codes)[kVector]) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      float code = values[v] * inverse + width.shift();
      if (kLimited) code = fminf(fmaxf(code, kRound), width.most());
      codes[v] = __float_as_uint(code);
    }
  }
};

template <class WidthOf>
struct Stochastic {
  using Width = WidthOf;
  static constexpr bool kStochastic = true;
  Width width;
  std::uint64_t seed;
  const std::uint64_t* runs;  // EncodeArgs::runs

  // A graph that runs again rounds anew.
  __device__ void renew() {
    if (runs) seed += *runs * 0x9E3779B97F4A7C15u;
  }

  __device__ static bool exceeds(const Extremes&, const Scale&) { return false; }  // always limited

  template <bool, int kVector>
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
      const float code = __fadd_rd(values[v] * inverse + u, width.shift());
      codes[v] = __float_as_uint(fminf(fmaxf(code, kRound), width.most()));
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
      upper = (upper << kBits) + kZeroCode;
    }
    packed.words[w] = word - upper;
  }
  return packed;
}

// Makes codes from number `count` on zero.
template <int kVector>
__device__ inline void cut(int count, std::uint32_t (&codes)[kVector]) {
#pragma unroll
  for (int v = 0; v < kVector; ++v)
    if (v >= count) codes[v] = kZeroCode;
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

// The blocks of a tile in rows. kBlock: the block size where it is known to the compiler, or 0.
// What is known is faster, and takes code of its own: not for what is slow or seldom used.
template <int kBlock>
struct Blocks {
  static constexpr bool kDoubles = kBlock == 0;
  Layout layout;

  __device__ int log2_block() const {
    return kBlock ? std::countr_zero(unsigned{kBlock}) : layout.log2_block;
  }

  template <int kVector>
  __device__ int block_of_row(int row) const {
    return (row * kLanes + lane_id()) * kVector >> log2_block();
  }

  // Of block lane_id(), which begins at value `own`.
  template <int kVector>
  __device__ Extremes extremes_of_own_block(int own, const float (&values)[kPerLane]) const {
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
    return {of_own_block<kVector>(spread, own, positive),
            of_own_block<kVector>(spread, own, negative) & ~kSign};
  }

  // Values times the factor; zeros in place of blocks that are no numbers; tiny blocks are lifted.
  template <int kVector>
  __device__ void make_ordinary(const Scale& scale, float factor, float (&values)[kPerLane]) const {
#pragma unroll
    for (int k = 0; k < kPerLane / kVector; ++k) {
      const bool is_nan = __shfl_sync(~0u, scale.is_nan, block_of_row<kVector>(k));
      const bool is_tiny = __shfl_sync(~0u, scale.is_tiny, block_of_row<kVector>(k));
#pragma unroll
      for (int v = k * kVector; v < (k + 1) * kVector; ++v)
        values[v] = is_nan ? 0.0f : values[v] * factor * (is_tiny ? kLift : 1.0f);
    }
  }

  // use(row, codes) for each row of a lane. Codes behind the tile's end are zero.
  template <bool kLimited, int kVector, class Quantiser, class Tile, class Use>
  __device__ void quantise(const Quantiser& quantiser, const Tile& tile, float own_inverse,
                           const float (&values)[kPerLane], Use use) const {
#pragma unroll
    for (int k = 0; k < kPerLane / kVector; ++k) {
      const int at = (k * kLanes + lane_id()) * kVector;
      const float inverse = __shfl_sync(~0u, own_inverse, block_of_row<kVector>(k));
      std::uint32_t codes[kVector];
      quantiser.template codes<kLimited>(tile.position + at, values + k * kVector, inverse, codes);
      if constexpr (!Tile::kDirect) cut(tile.n - at, codes);
      use(k, codes);
    }
  }
};

template <int kBits, Codebook kCodebook>
struct Decoder;

template <class Quantiser, int kBlock>
struct Encoder : Blocks<kBlock> {
  using Values = void;
  using Real = float;
  using DecodedBy = std::conditional_t<kBlock != 0 && !Quantiser::kStochastic,
                                       Decoder<Quantiser::Width::kBits, kLinear>, void>;
  static constexpr bool kNanBits = false, kCostly = kBlock == 0 && Quantiser::kStochastic;
  static constexpr int kBits = Quantiser::Width::kBits;
  Quantiser quantiser;
  std::uint32_t infinity = kInfinity;
  float factor = 1.0f;

  __device__ void prepare() const {}
  __device__ void renew()
    requires Quantiser::kStochastic
  {
    quantiser.renew();
  }

  template <int kVector, class Tile, class Writer>
  __device__ bool encode(const Tile& tile, float (&values)[kPerLane], Writer& out) const {
    const int own = lane_id() << this->log2_block();  // the first value of block lane_id()
    const Extremes found = this->template extremes_of_own_block<kVector>(own, values).times(factor);
    Scale scale = linear_scale<Quantiser::kStochastic>(quantiser.width, found, infinity);
    Chunk<kVector * kBits / 8> rows[kPerLane / kVector];
    // Values times the factor, times the inverse: where the scale is not tiny, the order of the
    // products changes no code, if that of the last two is exact. (A product that vanishes may
    // change a code that is rounded down.)
    const float inverse = scale.inverse * factor;
    const bool is_exact = fabsf(inverse) >= FLT_MIN && fabsf(inverse) <= FLT_MAX;
    const bool is_rare = scale.is_tiny || scale.is_nan || quantiser.exceeds(found, scale) ||
                         (found.extreme() != 0 && !is_exact) ||
                         (Quantiser::kStochastic && factor != 1.0f);
    const bool rare = __any_sync(~0u, is_rare);
    if (rare)
      this->template make_ordinary<kVector>(scale, factor, values);
    else
      scale.inverse = inverse;
    const auto take = [&](int k, const auto& codes) { rows[k] = pack<kBits>(codes); };
    if (!Tile::kDirect || rare)  // one piece of code for what takes little time
      this->template quantise<true, kVector>(quantiser, tile, scale.inverse, values, take);
    else
      this->template quantise<false, kVector>(quantiser, tile, scale.inverse, values, take);
    out.rows(tile, tile.first / 8 * kBits, this->layout.code_bytes, rows);
    if (own < tile.n) out.half_word(tile, this->layout.scale_offset(tile.first + own), scale.bits);
    return scale.is_nan;
  }
};

}  // namespace cccl::block_float::on_cuda
