// Codes of any number of bits back to values on the device, rotated or not. FORMAT.md.
#pragma once

#include "codecs/block_float/any_width.cuh"
#include "codecs/block_float/decoder.cuh"

namespace cccl::block_float::on_cuda {

// The levels of a field's codes. A code at bit p of the mantissa of 2^(23-p) is that number plus
// the code; the upper two are brought down to where there is room.
__device__ inline void levels_of_field(std::uint32_t field, int bits,
                                       float (&levels)[kFieldCodes]) {
  const std::uint32_t mask = (1u << bits) - 1;
  const std::uint32_t powers[] = {(127u + 23) << 23, (127u + 23 - bits) << 23};
  const float half = static_cast<float>(1 << (bits - 1));
#pragma unroll
  for (int i = 0; i < kFieldCodes; ++i)
    levels[i] = __uint_as_float(select_or(i < 2 ? field : field >> 2 * bits, mask << i % 2 * bits,
                                          powers[i % 2])) -
                (__uint_as_float(powers[i % 2]) + half);
}

template <int kBits>
__device__ inline std::uint32_t field_of(const std::uint32_t (&words)[kBits], int f) {
  const int w = f * kFieldCodes * kBits / 32, at = f * kFieldCodes * kBits % 32;
  if (at + kFieldCodes * kBits > 32) return __funnelshift_r(words[w], words[w + 1], at);
  return words[w] >> at;
}

struct Seeded {
  std::uint64_t seed;
};
struct Unseeded {};

// kRotated: any width under rotation, else those of at most kMostWords bits without a codebook.
template <bool kRotated>
struct AnyDecoder {
  using Values = void;
  static constexpr int kVector = kPerLane;
  static constexpr float kZero = 0.0f;
  static constexpr bool kBusy = kRotated;
  static constexpr int kMostWords = kRotated ? 8 : 6;  // in a lane
  Layout layout;
  int bits;
  Codebook codebook;

  template <int kVector>
  struct Fetched : std::conditional_t<kRotated, Seeded, Unseeded> {
    Chunk<4> rows[kMostWords];  // `bits` of them, then zeros
    std::uint32_t scale;        // of block lane_id(), or 0
  };

  template <int kVector, class Tile>
  __device__ Fetched<kVector> fetch(const Tile& tile, const BodyReader& in) const {
    Fetched<kVector> fetched;
    fetched.scale = lane_id() << layout.log2_block < tile.n
                        ? in.half_word(tile, layout.scale_offset(tile.first) + 2 * lane_id())
                        : 0;
    if constexpr (kRotated) fetched.seed = in.seed(tile);
#pragma unroll
    for (int k = 0; k < kMostWords; ++k) {
      fetched.rows[k] = {};
      if (k >= bits) continue;
      Chunk<4> row[1];
      in.rows(tile, tile.first / 8 * bits + k * kLanes * 4, layout.code_bytes, row);
      fetched.rows[k] = row[0];
    }
    return fetched;
  }

  // A lane for each line of codes, and one for the scales.
  template <class Tile>
  __device__ void prefetch(const Tile& tile, const BodyReader& in) const {
    static_assert(kTileValues / 8 == kLineBytes);  // so there are `bits` lines
    if (lane_id() <= bits)
      in.prefetch(lane_id() < bits ? tile.ahead / 8 * bits + lane_id() * kLineBytes
                                   : layout.scale_offset(tile.ahead));
  }

  template <int kVector, class Tile>
  __device__ std::uint64_t checksum(const Tile& tile, const Fetched<kVector>& fetched) const {
    return checksum_of(tile.first / 8 * bits, lane_id(), fetched.rows) +
           checksum_of(layout.scale_offset(tile.first) + 2 * lane_id(), fetched.scale);
  }

  template <int kVector, bool kAdd, class Tile, class Real>
  __device__ void apply(const Tile& tile, const Fetched<kVector>& fetched,
                        Real (&values)[kPerLane]) const {
#pragma unroll
    for (int k = 0; k < kMostWords; ++k)
      write_chunk<false>(tile.staging + k * kLanes * 4, fetched.rows[k], lane_id());
    __syncwarp();
    if constexpr (kRotated) {
      float turned[kPerLane];
      for_levels<kVector>(tile, fetched.scale, [&](int i, float level, float scale) {
        turned[i] = __fmaf_rn(level, scale, 0.0f);
      });
      turn_back<kVector>(tile, layout.log2_block, fetched.seed, fetched.scale, turned);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) values[i] = (kAdd ? values[i] : Real{0}) + turned[i];
    } else {
      for_levels<kVector>(tile, fetched.scale, [&](int i, float level, float scale) {
        add_product<kAdd>(level, scale, values[i]);
      });
    }
    if constexpr (!kAdd) unite_nans_of_blocks(fetched.scale, values);
  }

 private:
  // use(i, level, scale) for each value of a lane; the codes are in the staging memory, which is
  // free behind it.
  template <int kVector, class Tile, class Use>
  __device__ void for_levels(const Tile& tile, std::uint32_t own_scale, Use use) const {
    const auto use_field = [&](int i, int width, std::uint32_t field, float scale) {
      float levels[kFieldCodes];
      if (kRotated && width == 4 && codebook == kNormal4)
        levels_of_bytes(normal4_bytes(field), levels);
      else
        levels_of_field(field, width, levels);
#pragma unroll
      for (int c = 0; c < kFieldCodes && c < kVector; ++c) use(i + c, levels[c], scale);
    };
    const auto scale_of = [&](int row) {
      const int block = (row * kLanes + lane_id()) * kVector >> layout.log2_block;
      return __uint_as_float(__shfl_sync(~0u, own_scale, block) << 16);
    };
    if constexpr (kVector == kPerLane) {
      const float scale = scale_of(0);
      with_bits<kRotated>(bits, [&]<int kBits>(Bits<kBits>) {
        std::uint32_t words[kBits];
        read_own_words(tile.staging, words);
        __syncwarp();
#pragma unroll
        for (int f = 0; f < kFields; ++f)
          use_field(f * kFieldCodes, kBits, field_of(words, f), scale);
      });
    } else {
      // Fields lie in one or two words of 32 bits, as far apart in each row. (What lies behind the
      // last one may be another warp's.)
      constexpr int kCodes = kVector < kFieldCodes ? kVector : kFieldCodes;
      const auto* const words = reinterpret_cast<const std::uint32_t*>(tile.staging);
#pragma unroll
      for (int k = 0; k < kPerLane / kVector; ++k) {
        const float scale = scale_of(k);
#pragma unroll
        for (int c = 0; c < kVector; c += kCodes) {
          const int bit = (lane_id() * kVector + c) * bits, shift = bit % 32;
          const auto* const at = words + k * kVector * bits + bit / 32;
          const bool goes_on = shift + kCodes * bits > 32;
          const std::uint32_t field = __funnelshift_r(at[0], at[goes_on], shift);
          use_field(k * kVector + c, bits, field, scale);
        }
      }
      __syncwarp();
    }
  }
};

}  // namespace cccl::block_float::on_cuda
