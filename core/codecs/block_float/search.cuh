// level=best at 4 bits on the device: of two scales the one of less squared error. FORMAT.md adds
// the errors in 32 interleaved sums, so here a lane holds every 32nd value of a tile.
#pragma once

#include <array>

#include "codecs/block_float/block_float.cuh"
#include "devices/cuda/finish.cuh"

namespace cccl::block_float::on_cuda {

// By the 8-bit code q = 128 + round(x / scale), before it is limited: the smaller scale lets x /
// scale reach -127 / 0.92, a scale at its limit 128.5.
struct SearchTables {
  static constexpr int kBelow = 16, kEntries = kBelow + 256 + 16;
  std::uint16_t levels[kEntries];  // as bfloat16
  std::uint8_t codes[kEntries];
};

struct SearchMemory {
  SearchTables tables;
  alignas(16) float exchange[kWarps][kTileValues];
};

// One for the thread block.
__device__ inline SearchMemory& search_memory() {
  __shared__ SearchMemory memory;
  return memory;
}

// Values that lane l held in rows of kVector become every 32nd: values[m] is number 32 m + l of
// the tile. Chunks of 16 bytes are swizzled, so that neither side meets bank conflicts.
template <int kVector>
__device__ inline void exchange(float (&values)[kPerLane]) {
  constexpr int kSide = kVector < 4 ? kVector : 4;
  float* const memory = search_memory().exchange[threadIdx.x / kLanes];
  const auto place = [](int index) {
    const int chunk = index / 4;
    return (chunk ^ (chunk / 8 % 8)) * 4 + index % 4;
  };
#pragma unroll
  for (int i = 0; i < kPerLane; i += kSide) {
    const int index = (i / kVector * kLanes + lane_id()) * kVector + i % kVector;
    if constexpr (kSide == 4)
      *reinterpret_cast<float4*>(memory + place(index)) =
          make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    else
      for (int j = 0; j < kSide; ++j) memory[place(index + j)] = values[i + j];
  }
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kPerLane; ++m) values[m] = memory[place(m * kLanes + lane_id())];
  __syncwarp();
}

// Eight lanes hold a word of eight codes each: code i of lane j goes to code j of lane i.
__device__ inline std::uint32_t transpose_codes(std::uint32_t word) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    constexpr std::uint32_t kFirst[] = {0, 0x0F0F0F0Fu, 0x00FF00FFu, 0, 0x0000FFFFu};
    const bool upper = lane_id() & step;
    const std::uint32_t keep = upper ? ~kFirst[step] : kFirst[step];
    const std::uint32_t other = __shfl_xor_sync(~0u, word, step);
    const std::uint32_t moved = upper ? other >> 4 * step : other << 4 * step;
    word = (word & keep) | (moved & ~keep);
  }
  return word;
}

// Sums of a warp, added in halves: 16 to 31 onto 0 to 15, and so on. True if `b` has the less.
__device__ inline bool second_is_less(float a, float b) {
  const bool upper = lane_id() & 16;
  float sum = upper ? b : a;
  sum += __shfl_xor_sync(~0u, upper ? a : b, 16);
#pragma unroll
  for (int half = 8; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  return __shfl_sync(~0u, sum, 16) < __shfl_sync(~0u, sum, 0);
}

// kBlock: as for Encoder.
template <int kBlock>
struct Search {
  using Values = void;
  using Real = float;
  static constexpr bool kNanBits = false;
  Layout layout;
  std::uint32_t infinity = kInfinity;

  __device__ void prepare() const {
    constexpr auto kCuts = std::to_array(kNormal4Cuts);
    auto& tables = search_memory().tables;
    for (int i = static_cast<int>(threadIdx.x); i < SearchTables::kEntries; i += kThreads) {
      int code = 0;
#pragma unroll
      for (const std::uint8_t cut : kCuts) code += i - SearchTables::kBelow > cut;
      tables.codes[i] = static_cast<std::uint8_t>(code);
      constexpr auto kLevels = std::to_array(kNormal4Levels);
      const float level = kLevels[code];
      tables.levels[i] = static_cast<std::uint16_t>(__float_as_uint(level) >> 16);
    }
    __syncthreads();
  }

  template <int kVector, class Tile>
  __device__ bool encode(const Tile& tile, float (&values)[kPerLane], BodyWriter& out) const {
    exchange<kVector>(values);
    const int rows = (kBlock ? kBlock : 1 << layout.log2_block) / kLanes;  // of a block
    const auto [scale, found_nan] = best_scale(rows, values);
    write_codes(tile, rows, values, scale, out);
    const int first = lane_id() * rows * kLanes;  // value of block lane_id()
    if (first < tile.n) out.half_word(tile, layout.scale_offset(tile.first + first), scale.bits);
    return found_nan;
  }

 private:
  static constexpr float kShift = 0x1.8p23f;

  struct Found {
    Scale scale;  // of block lane_id()
    bool any_nan;
  };

  // Where the tables have the code of x.
  __device__ static std::uint32_t entry(float x, float inverse) {
    return __float_as_uint(x * inverse + kShift) - __float_as_uint(kShift) + 128 +
           SearchTables::kBelow;
  }

  __device__ Found best_scale(int rows, float (&values)[kPerLane]) const {
    const Extremes found = extremes(rows, values);
    const auto magnitude = scale_magnitude<8>(found, kReachExtreme, kReachOpposite, 1.0f);
    const auto less = scale_magnitude<8>(found, kReachExtreme, kReachOpposite, kClip);
    // Lifting both scales with the values, and lowering the weight, changes no bit of the errors.
    const bool is_tiny = found.extreme() != 0 && less < kTinyScale;
    Scale scale = make_scale(found, magnitude, is_tiny, infinity);
    const Scale smaller = make_scale(found, less, is_tiny, infinity);
    const float lift = is_tiny ? kLift : 1.0f;
    // Relative to the extreme, or an error's square would under- or overflow.
    const float extreme = __uint_as_float(found.extreme());
    float weight = extreme > 0x1p-120f ? __fdiv_rn(1.0f, extreme) : 0x1p120f;
    if (is_tiny) weight *= 1.0f / kLift;
    const bool any_nan = __any_sync(~0u, scale.is_nan);
    if (__any_sync(~0u, is_tiny | scale.is_nan)) {
#pragma unroll
      for (int m = 0; m < kPerLane; ++m) {
        values[m] *= __shfl_sync(~0u, lift, m / rows);
        if (__shfl_sync(~0u, scale.is_nan, m / rows)) values[m] = 0.0f;
      }
    }
    const auto& levels = search_memory().tables.levels;
    bool take_smaller = false;
    float sums[2], inverses[2], scales[2], weight_of_block;
#pragma unroll
    for (int m = 0; m < kPerLane; ++m) {
      const int block = m / rows;
      if (m % rows == 0) {
        weight_of_block = __shfl_sync(~0u, weight, block);
        const Scale* const of_lane[] = {&scale, &smaller};
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          sums[t] = 0.0f;
          inverses[t] = __shfl_sync(~0u, of_lane[t]->inverse, block);
          scales[t] = __shfl_sync(~0u, __uint_as_float(of_lane[t]->bits << 16) * lift, block);
        }
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const std::uint32_t at = entry(values[m], inverses[t]);
        const float level = __uint_as_float(std::uint32_t{levels[at]} << 16);
        // level * scale is exact: fused or not, the difference is rounded once.
        const float error = __fmaf_rn(-level, scales[t], values[m]) * weight_of_block;
        sums[t] += error * error;
      }
      if ((m + 1) % rows == 0 && second_is_less(sums[0], sums[1]) && lane_id() == block)
        take_smaller = true;
    }
    if (take_smaller) scale = smaller;
    return {scale, any_nan};
  }

  // Of block lane_id().
  __device__ static Extremes extremes(int rows, const float (&values)[kPerLane]) {
    Extremes mine{0, kSign};
    std::uint32_t positive = 0, negative = kSign;
#pragma unroll
    for (int m = 0; m < kPerLane; ++m) {
      positive = Signed::largest(positive, __float_as_uint(values[m]));
      negative = Unsigned::largest(negative, __float_as_uint(values[m]));
      if ((m + 1) % rows) continue;
      positive = Signed::largest_of_warp(positive);
      negative = Unsigned::largest_of_warp(negative);
      if (lane_id() == m / rows) mine = {positive, negative};
      positive = 0;
      negative = kSign;
    }
    return {mine.positive, mine.negative ^ kSign};
  }

  // Word w of a lane has the codes of values 8 w to 8 w + 7, which are spread over the tile; eight
  // lanes exchange them for neighbours.
  template <class Tile>
  __device__ void write_codes(const Tile& tile, int rows, const float (&values)[kPerLane],
                              const Scale& scale, BodyWriter& out) const {
    const auto& codes = search_memory().tables.codes;
    float inverse = 0.0f;
    Chunk<4> words[kPerLane / 8];
#pragma unroll
    for (int w = 0; w < kPerLane / 8; ++w) {
      std::uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int m = 8 * w + i;
        if (m % rows == 0) inverse = __shfl_sync(~0u, scale.inverse, m / rows);
        const std::uint32_t code = codes[entry(values[m], inverse)];
        if (Tile::kDirect || m * kLanes + lane_id() < tile.n) word |= code << 4 * i;
      }
      words[w] = {transpose_codes(word)};
    }
    const int place = lane_id() % 8 * 4 + lane_id() / 8;
    out.rows(tile, tile.first / 2, layout.code_bytes, words, place);
  }
};

}  // namespace cccl::block_float::on_cuda
