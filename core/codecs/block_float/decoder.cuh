// Codes back to values on the device. FORMAT.md.
#pragma once

#include "codecs/block_float/block_float.cuh"

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

// PRMT with all modes of its selector.
__device__ inline std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high,
                                              std::uint32_t selector) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// (word & mask) | bits in one instruction, which the compiler makes two if both are constants.
__device__ inline std::uint32_t select_or(std::uint32_t word, std::uint32_t mask,
                                          std::uint32_t bits) {
  asm("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(word) : "r"(mask), "r"(bits));
  return word;
}

// Four 4-bit codes in the low half of `word`: 128 + level of each in normal4, in a byte each.
// PRMT looks up eight bytes by three bits; the fourth makes it copy a sign, here 0.
__device__ inline std::uint32_t normal4_bytes(std::uint32_t word) {
  const std::uint32_t below = permute_bytes(four_levels(0), four_levels(4), word);
  const std::uint32_t above = permute_bytes(four_levels(8), four_levels(12), word ^ 0x8888u);
  return above + 0x80808080u - below;
}

// The levels of four bytes, which are 128 more: a byte in the mantissa of 2^23 is that number more.
__device__ inline void levels_of_bytes(std::uint32_t bytes, float* levels) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    levels[i] = __uint_as_float(permute_bytes(bytes, 0x4B000000u, 0x7440 + i)) - (0x1p23f + 128.0f);
}

// The levels of the codes in a word.
template <int kBits, Codebook kCodebook>
__device__ inline void levels_of_codes(std::uint32_t word, float (&levels)[32 / kBits]) {
  if constexpr (kBits == 8) {
    levels_of_bytes(word, levels);
  } else if constexpr (kCodebook == kNormal4) {
    levels_of_bytes(normal4_bytes(word), levels);
    levels_of_bytes(normal4_bytes(word >> 16), levels + 4);
  } else {
    static_assert(kBits == 4);
    // A code at bit p of the mantissa of 2^(23-p) is that number plus the code.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int shift = i < 5 ? 0 : 12, bit = 4 * i - shift;
      const std::uint32_t power = (127u + 23 - bit) << 23;
      levels[i] = __uint_as_float(select_or(word >> shift, 15u << bit, power)) -
                  (__uint_as_float(power) + 8.0f);
    }
  }
}

// value (+)= level * scale. The product is exact: fused or not, the sum is rounded once.
template <bool kAdd, class Real>
__device__ inline void add_product(float level, float scale, Real& value) {
  if constexpr (std::is_same_v<Real, float>)
    value = __fmaf_rn(level, scale, kAdd ? value : 0.0f);
  else
    value = (kAdd ? value : 0.0) + __fmaf_rn(level, scale, 0.0f);
}

// All NaNs become one, where lane_id()'s block or another's has a scale that is none.
template <class Real>
__device__ inline void unite_nans_of_blocks(std::uint32_t scale, Real (&values)[kPerLane]) {
  if (!__any_sync(~0u, (scale & 0x7FFFu) > kInfinity >> 16)) return;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (isnan(values[i])) values[i] = nan_of<Real>();
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

  template <int kVector, bool kAdd, class Tile, class Real>
  __device__ void apply(const Tile&, const Fetched<kVector>& fetched,
                        Real (&values)[kPerLane]) const {
    constexpr int kInWord = 32 / kBits;
    float scale = 0.0f;
#pragma unroll
    for (int at = 0; at < kPerLane; at += kInWord) {
      float levels[kInWord];
      levels_of_codes<kBits, kCodebook>(word_at(fetched, at), levels);
#pragma unroll
      for (int i = at; i < at + kInWord; ++i) {
        if (i % kVector == 0) {
          const int block = (i / kVector * kLanes + lane_id()) * kVector >> layout.log2_block;
          scale = __uint_as_float(__shfl_sync(~0u, fetched.scale, block) << 16);
        }
        add_product<kAdd>(levels[i - at], scale, values[i]);
      }
    }
    if constexpr (!kAdd) unite_nans_of_blocks(fetched.scale, values);
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
