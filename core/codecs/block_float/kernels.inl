// One tile at a time: n <= kTile values, blocks of `block` values, codes as bytes until packed.
// Loops run over whole tiles or blocks, so that every instruction set can take them in vectors.

#include "codecs/block_float/pack.inl"
#include "codecs/block_float/rotate.inl"

constexpr std::size_t kMostBlocks = kTile / kMinBlock;

// Of each block of a tile: the bits of its largest value of each sign, as >= 0.
struct Extremes {
  std::int32_t positive[kMostBlocks], negative[kMostBlocks];
};

// Of each block: its scale, and what maps a value to its multiple of it, x * lift * inverse.
struct Scales {
  std::uint16_t bits[kMostBlocks];
  float lift[kMostBlocks], inverse[kMostBlocks];
};

constexpr std::int32_t kInfinity = 0x7F800000;
constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, nearest even

// Memory is read a tile at a time, and the processor's own prefetching pauses in between: asks for
// what lies `ahead` of n bytes. Behind the last tile it asks in vain, which does no harm.
inline void prefetch(const void* at, std::size_t n, std::size_t ahead) {
  const auto next = reinterpret_cast<std::uintptr_t>(at) + ahead;
  for (std::size_t i = 0; i < n; i += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(next + i));
}

[[gnu::always_inline]] inline void find_extremes(const float* __restrict x, std::size_t blocks,
                                                 std::size_t block, Extremes& found) {
  for (std::size_t b = 0; b < blocks; ++b) {
    std::int32_t positive = 0;
    std::uint32_t largest = 0;  // unsigned, every negative value is above the positive ones
    for (std::size_t i = 0; i < block; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(x[b * block + i]);
      const auto value = static_cast<std::int32_t>(bits);
      positive = value > positive ? value : positive;
      largest = bits > largest ? bits : largest;
    }
    found.positive[b] = positive;
    found.negative[b] =
        largest > 0x80000000u ? static_cast<std::int32_t>(largest ^ 0x80000000u) : 0;
  }
}

// The scale that serves the extreme E and the opposite O: max(E * by_extreme, O * by_opposite).
template <int kBits>
inline void find_scales(const Extremes& found, std::size_t blocks, float by_extreme,
                        float by_opposite, float share, Scales& scales) {
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::int32_t positive = found.positive[b], negative = found.negative[b];
    const bool mirrored = positive > negative;
    const std::int32_t extreme = mirrored ? positive : negative;
    const std::int32_t opposite = mirrored ? negative : positive;
    const float a = std::bit_cast<float>(extreme) * by_extreme;
    const float o = std::bit_cast<float>(opposite) * by_opposite;
    const std::uint32_t magnitude = scale_bits((a > o ? a : o) * share, kBits);
    const std::uint32_t least = extreme > 0 ? 1 : 0;
    const std::uint32_t bits = (magnitude > least ? magnitude : least) | (mirrored ? 0x8000u : 0u);
    const float scale = std::bit_cast<float>(bits << 16);
    const float lift = scale < kTiny && scale > -kTiny ? kLift : 1.0f;
    const float inverse = 1.0f / (scale * lift);
    scales.bits[b] = static_cast<std::uint16_t>(bits);
    scales.lift[b] = lift;
    scales.inverse[b] = scale == 0 ? 0.0f : inverse;
  }
}

template <int kBits>
inline void find_linear_scales(const Extremes& found, std::size_t blocks, bool stochastic,
                               float share, Scales& scales) {
  constexpr float kHalf = 1 << (kBits - 1);
  find_scales<kBits>(found, blocks, 1.0f / kHalf, 1.0f / (stochastic ? kHalf - 1.0f : kHalf - 0.5f),
                     share, scales);
}

// codes = round(x / scale) + 2^(bits-1), limited to what `bits` can say. `kUsual`: no lift, and a
// scale that its limit has not made too small for the extreme, whose code then is 0 or more.
template <int kBits, bool kUsual>
[[gnu::always_inline]] inline void quantise_nearest(const float* __restrict x, std::size_t n,
                                                    float lift, float inverse,
                                                    std::uint8_t* __restrict codes) {
  constexpr std::int32_t kHalf = 1 << (kBits - 1);
  constexpr std::int32_t kLowest = std::bit_cast<std::int32_t>(kRound) - kHalf;
  constexpr std::int32_t kHighest = kLowest + 2 * kHalf - 1;
  for (std::size_t i = 0; i < n; ++i) {
    const float lifted = kUsual ? x[i] : x[i] * lift;
    auto code = std::bit_cast<std::int32_t>(lifted * inverse + kRound);
    if (!kUsual) code = code < kLowest ? kLowest : code;
    code = code > kHighest ? kHighest : code;
    codes[i] = static_cast<std::uint8_t>(code - kLowest);
  }
}

// Rounds up with a probability equal to the fraction: floor(x / scale + u), u uniform in [0, 1).
// The upper half of the position is the same for all n.
template <int kBits>
inline void quantise_stochastic(const float* __restrict x, std::size_t n, float lift, float inverse,
                                std::uint64_t position, std::uint64_t seed,
                                std::uint8_t* __restrict codes) {
  constexpr std::int32_t kHalf = 1 << (kBits - 1);
  const std::uint32_t key = random_key(position, seed);
  const auto low = static_cast<std::uint32_t>(position),
             seed_low = static_cast<std::uint32_t>(seed);
  const auto count = static_cast<std::uint32_t>(n);
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t random = mix(mix((low + i) ^ seed_low) + key);
    const float u = static_cast<float>(static_cast<std::int32_t>(random >> 8)) * 0x1p-24f;
    const float shifted = x[i] * lift * inverse + u;
    std::int32_t code = static_cast<std::int32_t>(shifted);
    code = code - (shifted < static_cast<float>(code) ? 1 : 0) + kHalf;
    code = code < 0 ? 0 : code;
    code = code > 2 * kHalf - 1 ? 2 * kHalf - 1 : code;
    codes[i] = static_cast<std::uint8_t>(code);
  }
}

// In place of an 8-bit code, that of the nearest level: how many cuts between levels lie below.
inline void nearest_normal4(std::uint8_t* codes, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    std::uint8_t code = 0;
    for (std::uint8_t c = 0; c < 15; ++c) code += codes[i] > kNormal4Cuts[c];
    codes[i] = code;
  }
}

// level(code) by adding up the gaps between levels: no table, which vectors could not look up in.
inline void normal4_levels(const std::uint8_t* __restrict codes, std::size_t n,
                           std::int8_t* __restrict levels) {
  for (std::size_t i = 0; i < n; ++i) {
    std::uint8_t level = static_cast<std::uint8_t>(kNormal4Levels[0]);
    for (std::uint8_t c = 1; c < 16; ++c) {
      const int gap = kNormal4Levels[c] - kNormal4Levels[c - 1];
      level += static_cast<std::uint8_t>(-(codes[i] >= c)) & static_cast<std::uint8_t>(gap);
    }
    levels[i] = static_cast<std::int8_t>(level);
  }
}

template <int kBits>
inline void linear_levels(const std::uint8_t* __restrict codes, std::size_t n,
                          std::int8_t* __restrict levels) {
  constexpr std::uint8_t kHalf = 1 << (kBits - 1);
  for (std::size_t i = 0; i < n; ++i)
    levels[i] = static_cast<std::int8_t>(static_cast<std::uint8_t>(codes[i] - kHalf));
}

template <int kBits>
[[gnu::always_inline]] inline void encode_linear(const float* x, std::size_t blocks,
                                                 std::size_t block, const Extremes& found,
                                                 const Rounding& rounding, Scales& scales,
                                                 std::uint8_t* codes) {
  find_linear_scales<kBits>(found, blocks, rounding.stochastic, 1.0f, scales);
  for (std::size_t b = 0; b < blocks; ++b) {
    const float lift = scales.lift[b], inverse = scales.inverse[b];
    const std::size_t at = b * block;
    prefetch(x + at, block * sizeof *x, kTile * sizeof *x);
    if (!rounding.stochastic) {
      if (lift == 1 && (scales.bits[b] & 0x7FFFu) < largest_scale(kBits))
        quantise_nearest<kBits, true>(x + at, block, lift, inverse, codes + at);
      else
        quantise_nearest<kBits, false>(x + at, block, lift, inverse, codes + at);
      continue;
    }
    // Split where the position's upper half changes.
    const std::uint64_t position = rounding.position + at;
    const std::uint64_t left = (std::uint64_t{1} << 32) - (position & 0xFFFFFFFFu);
    const std::size_t first = left < block ? static_cast<std::size_t>(left) : block;
    quantise_stochastic<kBits>(x + at, first, lift, inverse, position, rounding.seed, codes + at);
    quantise_stochastic<kBits>(x + at + first, block - first, lift, inverse, position + first,
                               rounding.seed, codes + at + first);
  }
}

// Squared error in 32 interleaved sums folded in halves: an order that a warp can follow.
inline float squared_error(const float* __restrict x, std::size_t n, float scale, float weight,
                           const std::int8_t* __restrict levels) {
  float sums[32] = {};
  for (std::size_t i = 0; i < n; i += 32)
    for (std::size_t lane = 0; lane < 32; ++lane) {
      const float error = (x[i + lane] - static_cast<float>(levels[i + lane]) * scale) * weight;
      sums[lane] += error * error;
    }
  for (int half = 16; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// level=best: of two scales that of the smaller squared error; at 4 bits with the other codebook.
template <int kBits>
inline void encode_searched(const float* x, std::size_t blocks, std::size_t block,
                            const Extremes& found, Scales& scales, std::uint8_t* codes) {
  Scales smaller;
  if constexpr (kBits == 4) {
    find_scales<8>(found, blocks, kReachExtreme, kReachOpposite, 1.0f, scales);
    find_scales<8>(found, blocks, kReachExtreme, kReachOpposite, kClip, smaller);
  } else {
    find_linear_scales<kBits>(found, blocks, false, 1.0f, scales);
    find_linear_scales<kBits>(found, blocks, false, linear_clip(kBits), smaller);
  }
  for (std::size_t b = 0; b < blocks; ++b) {
    const float* const values = x + b * block;
    // Relative to the extreme, or an error's square would under- or overflow.
    const auto extreme = std::bit_cast<float>(
        found.positive[b] > found.negative[b] ? found.positive[b] : found.negative[b]);
    const float weight = extreme > 0x1p-120f ? 1.0f / extreme : 0x1p120f;
    const auto search = [&](const Scales& scale, std::uint8_t* out) {
      std::int8_t levels[kMaxBlock];
      quantise_nearest<kBits == 4 ? 8 : kBits, false>(values, block, scale.lift[b],
                                                      scale.inverse[b], out);
      if constexpr (kBits == 4) {
        nearest_normal4(out, block);
        normal4_levels(out, block, levels);
      } else {
        linear_levels<kBits>(out, block, levels);
      }
      return squared_error(values, block, scale_value(scale.bits[b]), weight, levels);
    };
    std::uint8_t trial[kMaxBlock];
    if (search(scales, codes + b * block) <= search(smaller, trial)) continue;
    scales.bits[b] = smaller.bits[b];
    std::memcpy(codes + b * block, trial, block);
  }
}

// Whole blocks. Returns whether one of them has an Inf or NaN.
template <int kBits>
[[gnu::always_inline]] inline bool encode_blocks(const float* x, std::size_t blocks,
                                                 std::size_t block, const Rounding& rounding,
                                                 std::byte* packed, std::byte* scales_out) {
  // Codes of 8 bits are what they are packed to.
  alignas(64) std::uint8_t unpacked[kBits == 8 ? 1 : kTile];
  auto* const codes = kBits == 8 ? reinterpret_cast<std::uint8_t*>(packed) : unpacked;
  Extremes found = {};
  Scales scales;
  find_extremes(x, blocks, block, found);
  const bool searched = kBits <= kMostSearchedBits && rounding.search;
  if constexpr (kBits <= kMostSearchedBits) {
    if (searched) encode_searched<kBits>(x, blocks, block, found, scales, codes);
  }
  if (!searched) encode_linear<kBits>(x, blocks, block, found, rounding, scales, codes);
  bool non_finite = false;
  for (std::size_t b = 0; b < blocks; ++b) {
    if (found.positive[b] < kInfinity && found.negative[b] < kInfinity) continue;
    non_finite = true;
    scales.bits[b] = kNanScale;
    std::memset(codes + b * block, 1 << (kBits - 1), block);
  }
  if constexpr (kBits != 8) pack<kBits>(codes, blocks * block, packed);
  std::memcpy(scales_out, scales.bits, 2 * blocks);
  return non_finite;
}

template <int kBits>
bool encode(const float* x, std::size_t n, std::size_t block, const Rounding& rounding,
            std::byte* packed, std::byte* scales) {
  const std::size_t blocks = n / block, whole = blocks * block;
  // With a constant for the usual size, loops over a block have no remainders to look after.
  bool non_finite = block == kDefaultBlock
                        ? encode_blocks<kBits>(x, blocks, kDefaultBlock, rounding, packed, scales)
                        : encode_blocks<kBits>(x, blocks, block, rounding, packed, scales);
  if (whole == n) return non_finite;
  // A short last block, filled up with zeros: they change neither its scale nor its codes.
  const std::size_t rest = n - whole, padded = (rest + kMinBlock - 1) / kMinBlock * kMinBlock;
  alignas(64) float values[kMaxBlock];
  std::byte padded_codes[kMaxBlock];
  std::memcpy(values, x + whole, rest * sizeof *x);
  std::memset(values + rest, 0, (padded - rest) * sizeof *x);
  non_finite |= encode_blocks<kBits>(
      values, 1, padded,
      {rounding.stochastic, rounding.search, rounding.position + whole, rounding.seed},
      padded_codes, scales + 2 * blocks);
  const std::size_t bytes = (rest * kBits + 7) / 8, used = rest * kBits % 8;
  if (used) padded_codes[bytes - 1] &= static_cast<std::byte>((1 << used) - 1);
  std::memcpy(packed + whole * kBits / 8, padded_codes, bytes);
  return non_finite;
}

// kAdd: values += decoded. Else adding 0.0 turns the -0.0 of a zero under a negative scale to 0.0.
template <bool kAdd>
inline void scale_levels(const std::int8_t* __restrict levels, std::size_t n, float scale,
                         float* __restrict values) {
  for (std::size_t i = 0; i < n; ++i) {
    const float value = static_cast<float>(levels[i]) * scale;
    values[i] = kAdd ? values[i] + value : value + 0.0f;
  }
}

template <int kBits, bool kAdd>
void decode(const std::byte* packed, const std::byte* scales, std::size_t n, std::size_t block,
            std::uint8_t codebook, float* values) {
  alignas(64) std::uint8_t unpacked[kBits == 8 ? 1 : kTile];
  alignas(64) std::int8_t levels[kTile];
  const auto* codes = reinterpret_cast<const std::uint8_t*>(packed);
  if constexpr (kBits != 8) {
    unpack<kBits>(packed, n, unpacked);
    codes = unpacked;
  }
  if (kBits == 4 && codebook == kNormal4)
    normal4_levels(codes, n, levels);
  else
    linear_levels<kBits>(codes, n, levels);
  for (std::size_t at = 0; at < n; at += block, scales += 2) {
    prefetch(packed + at * kBits / 8, block * kBits / 8, kTile * kBits / 8);
    std::uint16_t bits;
    std::memcpy(&bits, scales, sizeof bits);
    scale_levels<kAdd>(levels + at, n - at < block ? n - at : block, scale_value(bits),
                       values + at);
  }
}

template <int kBits>
constexpr WidthKernels width_kernels() {
  return {encode<kBits>, decode<kBits, false>, decode<kBits, true>};
}

template <std::size_t... kIndex>
constexpr BlockKernels all_kernels(std::index_sequence<kIndex...>) {
  return {{width_kernels<kWidths[kIndex]>()...}, rotate, unrotate<false>, unrotate<true>};
}

const BlockKernels kKernels = all_kernels(std::make_index_sequence<std::size(kWidths)>());
