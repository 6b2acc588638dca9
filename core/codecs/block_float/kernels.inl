// One block at a time: n <= kMaxBlock values, codes as one byte each until they are packed.

struct Extremes {
  std::int32_t positive = 0, negative = 0;  // bits of the largest value of each sign, as >= 0
};

inline Extremes extremes(const float* x, std::size_t n) {
  std::int32_t positive = 0, negative = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<std::int32_t>(x[i]);
    const auto flipped = static_cast<std::int32_t>(static_cast<std::uint32_t>(bits) ^ 0x80000000u);
    positive = bits > positive ? bits : positive;
    negative = flipped > negative ? flipped : negative;
  }
  return {positive, negative};
}

// codes = round(x / scale) + 2^(bits-1). Adding 1.5 * 2^23 rounds to nearest even.
template <int kBits, bool kLifted>
inline void quantise_nearest(const float* x, std::size_t n, float inverse, std::uint8_t* codes) {
  constexpr float kRound = 0x1.8p23f;
  constexpr std::int32_t kHalf = 1 << (kBits - 1);
  for (std::size_t i = 0; i < n; ++i) {
    const float scaled = (kLifted ? x[i] * kLift : x[i]) * inverse;
    std::int32_t code =
        std::bit_cast<std::int32_t>(scaled + kRound) - std::bit_cast<std::int32_t>(kRound) + kHalf;
    code = code < 0 ? 0 : code;
    code = code > 2 * kHalf - 1 ? 2 * kHalf - 1 : code;
    codes[i] = static_cast<std::uint8_t>(code);
  }
}

// Rounds up with a probability equal to the fraction: floor(x / scale + u), u uniform in [0, 1).
template <int kBits, bool kLifted>
inline void quantise_stochastic(const float* x, std::size_t n, float inverse,
                                std::uint64_t position, std::uint64_t seed, std::uint8_t* codes) {
  constexpr std::int32_t kHalf = 1 << (kBits - 1);
  for (std::size_t i = 0; i < n; ++i) {
    const float u = static_cast<float>(random_bits(position + i, seed) >> 8) * 0x1p-24f;
    const float shifted = (kLifted ? x[i] * kLift : x[i]) * inverse + u;
    std::int32_t code = static_cast<std::int32_t>(shifted);
    code -= shifted < static_cast<float>(code);
    code += kHalf;
    code = code < 0 ? 0 : code;
    code = code > 2 * kHalf - 1 ? 2 * kHalf - 1 : code;
    codes[i] = static_cast<std::uint8_t>(code);
  }
}

template <int kBits>
inline void pack(const std::uint8_t* codes, std::size_t n, std::byte* out) {
  static_assert(kBits == 8 || kBits == 4);
  if constexpr (kBits == 8) {
    std::memcpy(out, codes, n);
  } else {
    const std::size_t pairs = n / 2;
    for (std::size_t i = 0; i < pairs; ++i)
      out[i] = static_cast<std::byte>(codes[2 * i] | codes[2 * i + 1] << 4);
    if (n % 2) out[pairs] = static_cast<std::byte>(codes[n - 1]);
  }
}

template <int kBits>
inline void unpack(const std::byte* in, std::size_t n, std::uint8_t* codes) {
  static_assert(kBits == 8 || kBits == 4);
  if constexpr (kBits == 8) {
    std::memcpy(codes, in, n);
  } else {
    const std::size_t pairs = n / 2;
    for (std::size_t i = 0; i < pairs; ++i) {
      codes[2 * i] = static_cast<std::uint8_t>(in[i]) & 15;
      codes[2 * i + 1] = static_cast<std::uint8_t>(in[i]) >> 4;
    }
    if (n % 2) codes[n - 1] = static_cast<std::uint8_t>(in[pairs]) & 15;
  }
}

// The block's scale for the linear codebook: the extreme gets the code -2^(bits-1) and stays
// exact but for the scale's own rounding; the largest value of the other sign is no further than
// half a step beyond the last code, or not beyond it where rounding is random and must not clip.
template <int kBits>
inline std::uint16_t linear_scale(Extremes found, bool stochastic) {
  constexpr float kHalf = 1 << (kBits - 1);
  const bool mirrored = found.positive > found.negative;
  const float extreme = std::bit_cast<float>(mirrored ? found.positive : found.negative);
  const float opposite = std::bit_cast<float>(mirrored ? found.negative : found.positive);
  const float by_extreme = extreme * (1.0f / kHalf);
  const float by_opposite = opposite * (1.0f / (stochastic ? kHalf - 1.0f : kHalf - 0.5f));
  std::uint16_t bits = scale_bits(by_extreme > by_opposite ? by_extreme : by_opposite, kBits);
  if (bits == 0 && extreme > 0) bits = 1;
  return static_cast<std::uint16_t>(bits | (mirrored ? 0x8000u : 0u));
}

inline float inverse_of(float scale, bool lifted) {
  if (scale == 0) return 0;
  return 1.0f / (lifted ? scale * kLift : scale);
}

inline bool is_tiny(float scale) { return scale < kTiny && scale > -kTiny; }

template <int kBits>
inline std::uint16_t encode_linear(const float* x, std::size_t n, Extremes found,
                                   const Rounding& rounding, std::uint8_t* codes) {
  const std::uint16_t bits = linear_scale<kBits>(found, rounding.stochastic);
  const float scale = scale_value(bits);
  const bool lifted = is_tiny(scale);
  const float inverse = inverse_of(scale, lifted);
  if (rounding.stochastic) {
    lifted
        ? quantise_stochastic<kBits, true>(x, n, inverse, rounding.position, rounding.seed, codes)
        : quantise_stochastic<kBits, false>(x, n, inverse, rounding.position, rounding.seed, codes);
  } else {
    lifted ? quantise_nearest<kBits, true>(x, n, inverse, codes)
           : quantise_nearest<kBits, false>(x, n, inverse, codes);
  }
  return bits;
}

inline void nearest_levels(const float* x, std::size_t n, float lift, float inverse,
                           std::uint8_t* codes) {
  for (std::size_t i = 0; i < n; ++i) {
    const float scaled = x[i] * lift * inverse;
    std::int32_t code = 0;
    for (int level = 0; level < 15; ++level)
      code += scaled > 0.5f * static_cast<float>(kNormal4Levels[level] + kNormal4Levels[level + 1]);
    codes[i] = static_cast<std::uint8_t>(code);
  }
}

// Squared error in 32 interleaved sums folded in halves: an order that a warp can follow.
inline float squared_error(const float* x, std::size_t n, float scale, float lift,
                           const std::uint8_t* codes) {
  float sums[32] = {};
  for (std::size_t i = 0; i < n; ++i) {
    const float error = (x[i] - static_cast<float>(kNormal4Levels[codes[i]]) * scale) * lift;
    sums[i % 32] += error * error;
  }
  for (int half = 16; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// level=best: the non-uniform codebook with the scale of least squared error; the first of equals.
inline std::uint16_t encode_searched(const float* x, std::size_t n, Extremes found,
                                     std::uint8_t* codes) {
  const bool mirrored = found.positive > found.negative;
  const float extreme = std::bit_cast<float>(mirrored ? found.positive : found.negative);
  const std::uint32_t sign = mirrored ? 0x8000u : 0u;
  // The error is measured relative to the extreme, or its square would under- or overflow.
  const float lift = extreme > 0x1p-120f ? 1.0f / extreme : 0x1p120f;
  std::uint8_t trial[kMaxBlock];
  std::uint16_t best = 0;
  float least = std::numeric_limits<float>::infinity();
  for (int c = 0; c < kClips; ++c) {
    auto magnitude = scale_bits(extreme * (clip(c) / 127.0f), 8);
    if (magnitude == 0 && extreme > 0) magnitude = 1;
    const auto bits = static_cast<std::uint16_t>(magnitude | sign);
    const float scale = scale_value(bits);
    const bool lifted = is_tiny(scale);
    nearest_levels(x, n, lifted ? kLift : 1.0f, inverse_of(scale, lifted), trial);
    const float error = squared_error(x, n, scale, lift, trial);
    if (c == 0 || error < least) {
      least = error;
      best = bits;
      std::memcpy(codes, trial, n);
    }
  }
  return best;
}

template <int kBits>
void encode_block(const float* x, std::size_t n, const Rounding& rounding, std::byte* packed,
                  std::uint16_t* scale) {
  std::uint8_t codes[kMaxBlock];
  const auto found = extremes(x, n);
  if (found.positive >= 0x7F800000 || found.negative >= 0x7F800000) {
    *scale = kNanScale;
    std::memset(codes, 1 << (kBits - 1), n);
  } else if (kBits == 4 && rounding.search) {
    *scale = encode_searched(x, n, found, codes);
  } else {
    *scale = encode_linear<kBits>(x, n, found, rounding, codes);
  }
  pack<kBits>(codes, n, packed);
}

// Adding 0.0 turns the -0.0 of a zero code times a negative scale into 0.0.
template <int kBits>
void decode_block(const std::byte* packed, std::size_t n, std::uint16_t scale_as_bits,
                  std::uint8_t codebook, float* values) {
  std::uint8_t codes[kMaxBlock];
  unpack<kBits>(packed, n, codes);
  const float scale = scale_value(scale_as_bits);
  if (kBits == 4 && codebook == kNormal4) {
    for (std::size_t i = 0; i < n; ++i)
      values[i] = static_cast<float>(kNormal4Levels[codes[i]]) * scale + 0.0f;
  } else {
    constexpr std::int32_t kHalf = 1 << (kBits - 1);
    for (std::size_t i = 0; i < n; ++i)
      values[i] = static_cast<float>(static_cast<std::int32_t>(codes[i]) - kHalf) * scale + 0.0f;
  }
}

template <int kBits>
constexpr BlockKernels kernels_of() {
  return {encode_block<kBits>, decode_block<kBits>};
}

const BlockKernels kKernels[] = {kernels_of<8>(), kernels_of<4>()};
