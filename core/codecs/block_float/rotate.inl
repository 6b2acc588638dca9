// The randomised Hadamard transform of whole blocks. Every sum and difference is rounded to
// float32, at distances 1, 2, 4 ... in turn: what the lanes of a vector, or of a GPU, can follow.

// Sixteen floats, in as many registers as they take.
typedef float Lanes __attribute__((vector_size(64)));

// Lane i becomes x(i) + x(i + d) where bit d of i is 0, else x(i - d) - x(i).
template <int kDistance>
[[gnu::always_inline]] inline void butterflies_within(Lanes& x) {
  Lanes other, sign;
  for (int i = 0; i < 16; ++i) {
    other[i] = x[i ^ kDistance];
    sign[i] = i & kDistance ? -1.0f : 1.0f;
  }
  x = other + x * sign;
}

[[gnu::always_inline]] inline void hadamard(float* x, std::size_t block) {
  for (std::size_t at = 0; at < block; at += 16) {
    Lanes lanes;
    std::memcpy(&lanes, x + at, sizeof lanes);
    butterflies_within<1>(lanes);
    butterflies_within<2>(lanes);
    butterflies_within<4>(lanes);
    butterflies_within<8>(lanes);
    std::memcpy(x + at, &lanes, sizeof lanes);
  }
  for (std::size_t distance = 16; distance < block; distance *= 2)
    for (std::size_t at = 0; at < block; at += 2 * distance)
      for (std::size_t i = at; i < at + distance; i += 16) {
        Lanes a, b;
        std::memcpy(&a, x + i, sizeof a);
        std::memcpy(&b, x + i + distance, sizeof b);
        const Lanes sum = a + b, difference = a - b;
        std::memcpy(x + i, &sum, sizeof sum);
        std::memcpy(x + i + distance, &difference, sizeof difference);
      }
}

// factors(i) = +-magnitude, by the sign of value i of a block.
inline void rotation_factors(std::size_t block, std::uint64_t seed, float magnitude,
                             float* __restrict factors) {
  for (std::size_t word = 0; word < block / 32; ++word) {
    const std::uint32_t signs = rotation_signs(static_cast<std::uint32_t>(word), seed);
    for (std::uint32_t i = 0; i < 32; ++i)
      factors[32 * word + i] =
          std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | (signs >> i & 1) << 31);
  }
}

template <std::size_t kBlock>
void rotate_blocks(const float* __restrict x, std::size_t n, std::size_t any_block,
                   std::uint64_t seed, float* __restrict out) {
  const std::size_t block = kBlock ? kBlock : any_block;
  alignas(64) float factors[kMaxBlock];
  rotation_factors(block, seed, 1.0f / static_cast<float>(block), factors);
  std::size_t at = 0;
  for (; at + block <= n; at += block) {
    for (std::size_t i = 0; i < block; ++i) out[at + i] = x[at + i] * factors[i];
    hadamard(out + at, block);
  }
  std::memcpy(out + at, x + at, (n - at) * sizeof *x);
}

// Works in `turned`; kAdd: values += what was turned back.
template <std::size_t kBlock, bool kAdd>
void unrotate_blocks(float* __restrict turned, const std::byte* scales, std::size_t n,
                     std::size_t any_block, std::uint64_t seed, float* __restrict values) {
  constexpr float kMost = 0x1.FEp127f;  // finite in a bfloat16 tensor too
  const std::size_t block = kBlock ? kBlock : any_block;
  const auto use = [&](std::size_t i, float value) {
    values[i] = kAdd ? values[i] + value : value + 0.0f;
  };
  alignas(64) float factors[kMaxBlock];
  rotation_factors(block, seed, 1.0f, factors);
  std::size_t at = 0;
  for (; at + block <= n; at += block, scales += 2) {
    float* const x = turned + at;
    std::uint16_t scale;
    std::memcpy(&scale, scales, sizeof scale);
    if ((scale & 0x7FFF) < kHugeScale) {
      hadamard(x, block);
      for (std::size_t i = 0; i < block; ++i) use(at + i, x[i] * factors[i]);
      continue;
    }
    const auto back = static_cast<float>(block);
    for (std::size_t i = 0; i < block; ++i) x[i] *= 1.0f / back;
    hadamard(x, block);
    for (std::size_t i = 0; i < block; ++i) {
      float value = x[i] * (factors[i] * back);
      value = value > kMost ? kMost : value;  // not a NaN
      use(at + i, value < -kMost ? -kMost : value);
    }
  }
  for (; at < n; ++at) use(at, turned[at]);
}

void rotate(const float* x, std::size_t n, std::size_t block, std::uint64_t seed, float* out) {
  block == kDefaultBlock ? rotate_blocks<kDefaultBlock>(x, n, block, seed, out)
                         : rotate_blocks<0>(x, n, block, seed, out);
}

template <bool kAdd>
void unrotate(float* turned, const std::byte* scales, std::size_t n, std::size_t block,
              std::uint64_t seed, float* values) {
  block == kDefaultBlock
      ? unrotate_blocks<kDefaultBlock, kAdd>(turned, scales, n, block, seed, values)
      : unrotate_blocks<0, kAdd>(turned, scales, n, block, seed, values);
}
