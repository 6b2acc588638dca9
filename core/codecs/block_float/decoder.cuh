// Codes back to values on the device. FORMAT.md.
#pragma once

#include "codecs/block_float/block_float.cuh"
#include "devices/cuda/tensor_core.cuh"

namespace cccl::block_float::on_cuda {

// |kNormal4Levels[first + i]| for i in 0 ... 3, byte by byte.
constexpr std::uint32_t four_levels(int first) {
  std::uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const int level = kNormal4Levels[first + i];
    bytes |= static_cast<std::uint32_t>(level < 0 ? -level : level) << 8 * i;
  }
  return bytes;
}

// Four 4-bit codes in the low half of `word`: 128 + level of each in normal4, in a byte each.
// PRMT looks up eight bytes by three bits; the fourth makes it copy a sign, here 0.
__device__ inline std::uint32_t normal4_bytes(std::uint32_t word) {
  const std::uint32_t below = permute_bytes(four_levels(0), four_levels(4), word);
  const std::uint32_t above = permute_bytes(four_levels(8), four_levels(12), word ^ 0x8888u);
  return above + 0x80808080u - below;
}

// The levels of the codes in a word.
template <int kBits, Codebook kCodebook>
class Levels {
 public:
  static constexpr int kInWord = 32 / kBits;

  __device__ void prepare() {
    ones_ = diagonal_of(0x3C00);
    sixteenths_ = diagonal_of(0x2C00);
  }

  __device__ void of(std::uint32_t word, float (&levels)[kInWord]) const {
    if constexpr (kBits == 8) {
      of_bytes(word, levels);
    } else if constexpr (kCodebook == kNormal4) {
      of_bytes(normal4_bytes(word), levels);
      of_bytes(normal4_bytes(word >> 16), levels + 4);
    } else {
#ifdef NOMMA
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at=4*i, shift = at + 4 > 23 ? 12 : 0, bit = at - shift;
        const std::uint32_t exponent = (127u + 23 - bit) << 23;
        levels[i] = __uint_as_float(select_or(word >> shift, 15u << bit, exponent)) - (__uint_as_float(exponent) + 8);
      }
      return;
#endif
      // Codes 0 and 4, 2 and 6; then those between, which are 16 times as large.
      const std::uint32_t upper = word >> 8;
      widen({select_or(word, 0x000F000F, kHalf1024), select_or(upper, 0x000F000F, kHalf1024)},
            ones_, -1032.0f, levels[0], levels[4], levels[2], levels[6]);
      widen({select_or(word, 0x00F000F0, kHalf1024), select_or(upper, 0x00F000F0, kHalf1024)},
            sixteenths_, -72.0f, levels[1], levels[5], levels[3], levels[7]);
    }
  }

 private:
  static constexpr std::uint32_t kHalf1024 = 0x64006400u;  // twice 1024: its last bit counts 1

  __device__ void of_bytes(std::uint32_t bytes, float* levels) const {
#ifdef NOMMA
#pragma unroll
    for (int i = 0; i < 4; ++i) levels[i] = __uint_as_float(permute_bytes(bytes, 0x4B000000u, 0x7440 + i)) - (0x1p23f + 128);
    return;
#endif
    widen({permute_bytes(bytes, kHalf1024, 0x5150), permute_bytes(bytes, kHalf1024, 0x5352)}, ones_,
          -1024.0f - 128.0f, levels[0], levels[1], levels[2], levels[3]);
  }

  std::uint32_t ones_ = 0, sixteenths_ = 0;
};

template <int kBits, Codebook kCodebook>
struct Decoder {
  using Values = void;
  static constexpr int kVector = kChunkBytes * 8 / kBits;
  static constexpr float kZero = 0.0f;
  Layout layout;
  Levels<kBits, kCodebook> levels_of;

  __device__ void prepare() { levels_of.prepare(); }

  template <int kVector>
  struct Fetched {
    Chunk<kVector * kBits / 8> rows[kPerLane / kVector];
    std::uint32_t scale;  // of block lane_id(), or 0
  };

  template <int kVector, class Tile>
  __device__ Fetched<kVector> fetch(const Tile& tile, const BodyReader& in) const {
    Fetched<kVector> fetched;
    fetched.scale = has_scale(tile) ? in.half_word(tile, scale_offset(tile)) : 0;
    in.rows(tile, tile.first / 8 * kBits, layout.code_bytes, fetched.rows);
    return fetched;
  }

  // A lane for each line of codes, and one for the scales.
  template <class Tile>
  __device__ void prefetch(const Tile& tile, const BodyReader& in) const {
    constexpr int kLines = kTileValues / 8 * kBits / kLineBytes;
    if (lane_id() <= kLines)
      in.prefetch(lane_id() < kLines ? tile.ahead / 8 * kBits + lane_id() * kLineBytes
                                     : layout.scale_offset(tile.ahead));
  }

  template <int kVector, class Tile>
  __device__ std::uint64_t checksum(const Tile& tile, const Fetched<kVector>& fetched) const {
    return checksum_of(tile.first / 8 * kBits, lane_id(), fetched.rows) +
           checksum_of(scale_offset(tile), fetched.scale);
  }

  template <int kVector, Into kInto, class Real>
  __device__ void apply(const Fetched<kVector>& fetched, Real (&values)[kPerLane]) const {
    constexpr int kInWord = Levels<kBits, kCodebook>::kInWord;
    float scale = 0.0f;
#pragma unroll
    for (int at = 0; at < kPerLane; at += kInWord) {
      float levels[kInWord];
      levels_of.of(word_at(fetched, at), levels);
#pragma unroll
      for (int i = at; i < at + kInWord; ++i) {
        if (i % kVector == 0) {
          const int block = (i / kVector * kLanes + lane_id()) * kVector >> layout.log2_block;
          scale = __uint_as_float(__shfl_sync(~0u, fetched.scale, block) << 16);
        }
        // The product is exact: fused or not, the sum is rounded once.
        Real& value = values[i];
        if constexpr (std::is_same_v<Real, float>)
          value = __fmaf_rn(levels[i - at], scale, kInto == Into::kSum ? value : 0.0f);
        else
          value = (kInto == Into::kSum ? value : 0.0) + __fmaf_rn(levels[i - at], scale, 0.0f);
      }
    }
    if (kInto != Into::kValue) return;
    if (!__any_sync(~0u, (fetched.scale & 0x7FFFu) > kInfinity >> 16)) return;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (isnan(values[i])) values[i] = nan_of<Real>();
  }

 private:
  template <class Tile>
  __device__ bool has_scale(const Tile& tile) const {
    return lane_id() << layout.log2_block < tile.n;
  }

  template <class Tile>
  __device__ std::uint64_t scale_offset(const Tile& tile) const {
    return layout.scale_offset(tile.first) + 2 * lane_id();
  }

  // 32 bits of codes, of values `at` and on. They may lie in several short rows.
  template <int kVector>
  __device__ static std::uint32_t word_at(const Fetched<kVector>& fetched, int at) {
    constexpr int kRowBits = kVector * kBits;
    if constexpr (kRowBits >= 32) {
      return fetched.rows[at / kVector].words[at % kVector * kBits / 32];
    } else {
      std::uint32_t word = 0;
#pragma unroll
      for (int k = 0; k < 32 / kRowBits; ++k)
        word |= fetched.rows[at / kVector + k].words[0] << k * kRowBits;
      return word;
    }
  }
};

}  // namespace cccl::block_float::on_cuda
