// The randomised Hadamard transform of the blocks of a tile on the device. FORMAT.md, "Rotation".
#pragma once

#include "codecs/block_float/block_float.cuh"

namespace cccl::block_float::on_cuda {

// Blocks in rows of kVector values in each lane. The last block may be cut short: it stays as it
// is.
template <int kVector, class Tile>
struct WholeBlocks {
  const Tile& tile;
  int log2_block;

  __device__ int block_of_row(int row) const {
    return (row * kLanes + lane_id()) * kVector >> log2_block;
  }
  __device__ bool operator()(int row) const {
    return Tile::kDirect || (block_of_row(row) + 1) << log2_block <= tile.n;
  }
};

// Sums and differences at distances 1, 2, 4 ... in turn: within a lane's vector, between lanes,
// between rows.
template <int kVector, class Tile>
__device__ inline void hadamard(const WholeBlocks<kVector, Tile>& whole,
                                float (&values)[kPerLane]) {
  const int block = 1 << whole.log2_block;
  const auto pairs = [&](int distance) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i & distance || !whole(i / kVector)) continue;
      const float a = values[i], b = values[i + distance];
      values[i] = a + b;
      values[i + distance] = a - b;
    }
  };
#pragma unroll
  for (int distance = 1; distance < kVector; distance *= 2) pairs(distance);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    if (step * kVector >= block) return;
    const float sign = lane_id() & step ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float other = __shfl_xor_sync(~0u, values[i], step);
      if (whole(i / kVector))
        values[i] = __fmaf_rn(values[i], sign, other);  // the product is exact
    }
  }
#pragma unroll
  for (int distance = kVector; distance < kPerLane; distance *= 2) {
    if (distance * kLanes >= block) return;
    pairs(distance);
  }
}

// The signs of places in a block: lane l has those of places 32 l to 32 l + 31 in its bits.
struct Signs {
  std::uint32_t own;

  __device__ explicit Signs(std::uint64_t seed)
      : own(rotation_signs(static_cast<std::uint32_t>(lane_id()), seed)) {}

  // Bit v is that of value v of this lane's row. (A block has at least 32 values.)
  template <int kVector>
  __device__ std::uint32_t of_row(int row, int log2_block) const {
    const int first = (row * kLanes + lane_id()) * kVector;
    const std::uint32_t word = __shfl_sync(~0u, own, first / 32 & ((1 << log2_block) / 32 - 1));
    return word >> first % 32;
  }
};

// x with its sign turned where bit v is 1.
__device__ inline float with_sign(float x, std::uint32_t signs, int v) {
  return __uint_as_float(__float_as_uint(x) ^ (signs << (31 - v) & kSign));
}

// What an encoder does first.
struct Rotation {
  bool on;
  std::uint64_t seed;

  template <int kVector, class Tile>
  __device__ void turn(const Tile& tile, int log2_block, float (&values)[kPerLane]) const {
    const WholeBlocks<kVector, Tile> whole{tile, log2_block};
    const Signs signs(seed);
    const float share = __uint_as_float((127u - log2_block) << 23);  // 1 / block
#pragma unroll
    for (int k = 0; k < kPerLane / kVector; ++k) {
      const std::uint32_t of_row = signs.of_row<kVector>(k, log2_block);
      if (!whole(k)) continue;
#pragma unroll
      for (int v = 0; v < kVector; ++v) values[k * kVector + v] *= with_sign(share, of_row, v);
    }
    hadamard(whole, values);
  }
};

// What a decoder does last, with values that have the scale in lane_id()'s `scale`, 16 bits, of
// block lane_id().
template <int kVector, class Tile>
__device__ inline void turn_back(const Tile& tile, int log2_block, std::uint64_t seed,
                                 std::uint32_t scale, float (&values)[kPerLane]) {
  constexpr int kRows = kPerLane / kVector;
  constexpr float kMost = 0x1.FEp127f;  // finite in a bfloat16 tensor too
  const WholeBlocks<kVector, Tile> whole{tile, log2_block};
  const auto is_huge = [&](int row) {
    const std::uint32_t of_row = __shfl_sync(~0u, scale, whole.block_of_row(row));
    return (of_row & 0x7FFFu) >= kHugeScale && whole(row);
  };
  const float block = static_cast<float>(1 << log2_block);
  const float share = __uint_as_float((127u - log2_block) << 23);
  const bool any_huge = __any_sync(~0u, (scale & 0x7FFFu) >= kHugeScale);
  if (any_huge) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const float by = is_huge(k) ? share : 1.0f;
#pragma unroll
      for (int v = 0; v < kVector; ++v) values[k * kVector + v] *= by;
    }
  }
  hadamard(whole, values);
  const Signs signs(seed);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const std::uint32_t of_row = signs.of_row<kVector>(k, log2_block);
    if (!whole(k)) continue;
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      values[k * kVector + v] = with_sign(values[k * kVector + v], of_row, v);
  }
  if (!any_huge) return;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const bool huge = is_huge(k);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      float& value = values[k * kVector + v];
      const float back = value * block;
      if (huge) value = back > kMost ? kMost : back < -kMost ? -kMost : back;  // a NaN stays
    }
  }
}

}  // namespace cccl::block_float::on_cuda
