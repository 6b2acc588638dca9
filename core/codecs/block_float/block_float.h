// The numbers of the block_float format that every device shares, CUDA code too: so functions are
// constexpr. FORMAT.md is the specification.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "api/codec.h"

namespace cccl::block_float {

inline constexpr std::size_t kMinBlock = 32, kMaxBlock = 1024, kDefaultBlock = 128;

// Header params: [0] bits, [1] log2 of the block size, [2] codebook, [3] transform (0: none).
enum Codebook : std::uint8_t { kLinear = 0, kNormal4 = 1 };

// Sixteen levels fitted to real gradients with a searched scale (Lloyd's method), in int8 so that
// level x scale is exact in float32. Index 8 is zero, as in the linear codebook.
inline constexpr std::int8_t kNormal4Levels[16] = {-127, -97, -77, -61, -47, -33, -21, -10,
                                                   0,    12,  23,  35,  49,  65,  84,  107};

// Scales tried by level=best, as a share of the one that reaches the block's extreme.
inline constexpr int kClips = 16;
constexpr float clip(int i) { return 1.09375f - 0.03125f * static_cast<float>(i); }

struct Settings {
  int bits = 8;
  std::size_t block = kDefaultBlock;
  bool stochastic = false, search = false;
  std::uint8_t codebook = kLinear;
};

// Of a block_float codec on a CPU.
const Settings& settings_of(const Codec& codec);

inline constexpr std::uint16_t kNanScale = 0x7FC0;

constexpr std::size_t code_bytes(std::size_t n, int bits) {
  return ((n * static_cast<std::size_t>(bits) + 7) / 8 + 1) / 2 * 2;  // scales stay aligned
}

constexpr std::size_t body_bytes(std::size_t n, int bits, std::size_t block) {
  return code_bytes(n, bits) + 2 * ((n + block - 1) / block);
}

// The scale as bfloat16 bits, rounded up so that no code clips, and small enough that
// 2^(bits-1) x scale stays finite. `magnitude` is finite.
constexpr std::uint16_t scale_bits(float magnitude, int bits) {
  const std::uint32_t up = (std::bit_cast<std::uint32_t>(magnitude) + 0xFFFFu) >> 16;
  const std::uint32_t largest = 0x7F7Fu - (static_cast<std::uint32_t>(bits - 1) << 7);
  return static_cast<std::uint16_t>(up < largest ? up : largest);
}

constexpr float scale_value(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// A scale this small has no finite reciprocal: values and scale are first multiplied by kLift.
inline constexpr float kTiny = 0x1p-100f, kLift = 0x1p64f;

// 32 random bits of a value's position in its tensor: two rounds of C. Wellons' lowbias32.
constexpr std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

constexpr std::uint32_t random_bits(std::uint64_t position, std::uint64_t seed) {
  const auto low = static_cast<std::uint32_t>(position);
  const auto high = static_cast<std::uint32_t>(position >> 32);
  const std::uint32_t key = mix(static_cast<std::uint32_t>(seed >> 32) + 0x9E3779B9u * (high + 1));
  return mix(mix(low ^ static_cast<std::uint32_t>(seed)) + key);
}

}  // namespace cccl::block_float
