// The numbers of the block_float format that every device shares, CUDA code too: so functions are
// constexpr. FORMAT.md is the specification.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "api/codec.h"

namespace cccl::block_float {

inline constexpr std::size_t kMinBlock = 32, kMaxBlock = 1024, kDefaultBlock = 128;

// Every width there is. Each is a codec of its own.
inline constexpr int kWidths[] = {8, 6, 5, 4, 3, 2};

// Header params: [0] bits, [1] log2 of the block size, [2] codebook, [3] transform.
enum Codebook : std::uint8_t { kLinear = 0, kNormal4 = 1 };
enum Transform : std::uint8_t { kNoTransform = 0, kHadamard = 1 };

// Sixteen levels fitted to real gradients with a searched scale (Lloyd's method), in int8 so that
// level x scale is exact in float32. Index 8 is zero, as in the linear codebook.
inline constexpr std::int8_t kNormal4Levels[16] = {-127, -97, -77, -61, -47, -33, -21, -10,
                                                   0,    12,  23,  35,  49,  65,  84,  107};

// An 8-bit code above cut i has a code above i: 128 + floor(middle of levels i and i + 1).
inline constexpr std::uint8_t kNormal4Cuts[15] = {16,  41,  59,  74,  88,  101, 112, 123,
                                                  134, 145, 157, 170, 185, 202, 223};

// level=best tries two scales: one that reaches the block's extreme E exactly and its opposite O
// all but 3 %, max(E * kReachExtreme, O * kReachOpposite), and a smaller one, kClip times that.
inline constexpr float kReachExtreme = 1.0f / 127, kReachOpposite = 0.97f / 107, kClip = 0.92f;

// With fewer bits it keeps the linear codebook, and tries the scale of level=fast and this share
// of it.
constexpr float linear_clip(int bits) { return bits == 3 ? 0.8f : 0.65f; }

// Beyond 4 bits there is nothing to search for.
inline constexpr int kMostSearchedBits = 4;

struct Settings {
  int bits = 8;
  std::size_t block = kDefaultBlock;
  bool stochastic = false, search = false;
  std::uint8_t codebook = kLinear, transform = kNoTransform;
};

// Of a block_float codec on a CPU.
const Settings& settings_of(const Codec& codec);

// A codec of any width, rotated or not, on CUDA devices.
std::shared_ptr<const Codec> any_width_on_cuda(std::shared_ptr<const Codec> codec);

inline constexpr std::uint16_t kNanScale = 0x7FC0;

constexpr std::size_t code_bytes(std::size_t n, int bits) {
  return ((n * static_cast<std::size_t>(bits) + 7) / 8 + 1) / 2 * 2;  // scales stay aligned
}

constexpr std::size_t body_bytes(std::size_t n, int bits, std::size_t block) {
  return code_bytes(n, bits) + 2 * ((n + block - 1) / block);
}

// The largest scale whose product with 2^(bits-1) is finite, as bfloat16 bits.
constexpr std::uint32_t largest_scale(int bits) {
  return 0x7F7Fu - (static_cast<std::uint32_t>(bits - 1) << 7);
}

// The scale as bfloat16 bits, rounded up so that no code clips, up to the largest. `magnitude` is
// finite.
constexpr std::uint16_t scale_bits(float magnitude, int bits) {
  const std::uint32_t up = (std::bit_cast<std::uint32_t>(magnitude) + 0xFFFFu) >> 16;
  return static_cast<std::uint16_t>(up < largest_scale(bits) ? up : largest_scale(bits));
}

constexpr float scale_value(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// A scale this small has no finite reciprocal: values and scale are first multiplied by kLift.
inline constexpr float kTiny = 0x1p-100f, kLift = 0x1p64f;

// Random bits of a value at `position` of its tensor: mix(mix(low ^ seed_low) + random_key), with
// C. Wellons' lowbias32.
constexpr std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// What the upper halves of seed and position contribute.
constexpr std::uint32_t random_key(std::uint64_t position, std::uint64_t seed) {
  const auto high = static_cast<std::uint32_t>(position >> 32);
  return mix(static_cast<std::uint32_t>(seed >> 32) + 0x9E3779B9u * (high + 1));
}

// Bit i of it is the sign of value 32 * word + i of every block under a rotation: the random bits
// of a position that no tensor has.
constexpr std::uint32_t rotation_signs(std::uint32_t word, std::uint64_t seed) {
  constexpr std::uint64_t kNowhere = std::uint64_t{1} << 63;
  return mix(mix(word ^ static_cast<std::uint32_t>(seed)) + random_key(kNowhere, seed));
}

// Decoding a rotated block adds up to kMaxBlock values. A scale from here on (2^100 as bfloat16)
// may have no room for that: its values are divided by the block size meanwhile.
inline constexpr std::uint16_t kHugeScale = 0x7180;

}  // namespace cccl::block_float
