// level=best on the device: of two scales the one of less squared error. FORMAT.md adds the errors
// in 32 interleaved sums, so here a lane holds every 32nd value of a tile.
#pragma once

#include <array>

#include "codecs/block_float/any_width.cuh"
#include "codecs/block_float/decoder.cuh"
#include "devices/cuda/finish.cuh"

namespace cccl::block_float::on_cuda {

// By q = 128 + round(x / scale), before it is limited: the smaller scale lets x / scale reach
// -127 / 0.92, a scale at its limit 128.5. Lanes have levels of their own, so that
// look-ups of a warp never meet in a bank.
struct SearchTables {
  static constexpr int kBelow = 16, kEntries = kBelow + 256 + 16;
  float levels[kEntries][kLanes];
  std::uint8_t codes[kEntries];
};

// One for the thread block.
__device__ inline SearchTables& search_tables() {
  __shared__ SearchTables tables;
  return tables;
}

// By their 32-bit addresses, whose arithmetic is cheap. kConstant: nobody writes there any more.
template <bool kConstant>
__device__ inline float read_shared(std::uint32_t address) {
  float value;
  if constexpr (kConstant)
    asm("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  else
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ inline void write_shared(std::uint32_t address, const float (&values)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

// Where the exchange keeps a value, in bytes: chunks of 16 are swizzled, so that neither side meets
// bank conflicts. The place of a sum of numbers with no bit in common is the XOR of their places.
__device__ constexpr std::uint32_t place_of(int number) {
  const int chunk = number / 4;
  return static_cast<std::uint32_t>(((chunk ^ (chunk / 8 % 8)) * 4 + number % 4) * 4);
}

// Values that lane l held in rows of kVector become every 32nd: values[m] is number 32 m + l of
// the tile. They pass through `memory` in parts.
template <int kVector>
__device__ inline void exchange(std::byte* memory, float (&values)[kPerLane]) {
  static_assert(kVector % 4 == 0);
  constexpr int kPart = kStagingBytes / sizeof(float);
  const auto base = static_cast<std::uint32_t>(__cvta_generic_to_shared(memory));
  const int mine = lane_id() * kVector;
  const std::uint32_t to = base + place_of(mine) % kStagingBytes, from = base + place_of(lane_id());
  float columns[kPerLane];
#pragma unroll
  for (int part = 0; part < kTileValues / kPart; ++part) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      const int other = i / kVector * kLanes * kVector + i % kVector;  // the rest of its number
      if (mine / kPart + other / kPart == part)
        write_shared(to ^ place_of(other) % kStagingBytes,
                     {values[i], values[i + 1], values[i + 2], values[i + 3]});
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kPart / kLanes; ++m)
      columns[part * (kPart / kLanes) + m] = read_shared<false>(from ^ place_of(m * kLanes));
  }
#pragma unroll
  for (int m = 0; m < kPerLane; ++m) values[m] = columns[m];
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

// Each of kCount sums added up over the lanes: 16 to 31 onto 0 to 15, and so on. Half of the lanes
// go on with half of the sums, so that lane l ends with number l * kCount / 32.
template <int kHalf, int kCount>
__device__ inline float add_lanes(const float (&sums)[kCount]) {
  if constexpr (kHalf == 0) {
    static_assert(kCount == 1);
    return sums[0];
  } else if constexpr (kCount == 1) {
    const float sum[1] = {sums[0] + __shfl_xor_sync(~0u, sums[0], kHalf)};
    return add_lanes<kHalf / 2>(sum);
  } else {
    const bool upper = lane_id() & kHalf;
    float kept[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float sent = upper ? sums[i] : sums[i + kCount / 2];
      kept[i] = (upper ? sums[i + kCount / 2] : sums[i]) + __shfl_xor_sync(~0u, sent, kHalf);
    }
    return add_lanes<kHalf / 2>(kept);
  }
}

// The codebook of 4 bits.
struct Normal4Book {
  static constexpr bool kAny = false;
  std::uint32_t infinity = kInfinity;

  __device__ std::uint32_t least_infinity() const { return infinity; }
  __device__ static constexpr int scale_bits() { return 8; }
  __device__ static constexpr float by_extreme() { return kReachExtreme; }
  __device__ static constexpr float by_opposite() { return kReachOpposite; }
  __device__ static constexpr float clip() { return kClip; }

  __device__ static std::uint32_t code_of(int q) {
    constexpr auto kCuts = std::to_array(kNormal4Cuts);
    std::uint32_t code = 0;
#pragma unroll
    for (const std::uint8_t cut : kCuts) code += q > cut;
    return code;
  }
  __device__ static float level_of(std::uint32_t code) {
    return static_cast<float>(static_cast<int>(normal4_bytes(code) & 0xFFu) - 128);
  }
};

// That, or the linear codes of 3 or 2 bits, rotated or not.
struct AnyBook {
  static constexpr bool kAny = true;
  AnyWidth width;
  Rotation rotation;

  __device__ static std::uint32_t least_infinity() { return kInfinity; }
  __device__ bool is_normal4() const { return width.bits() == 4; }
  __device__ int scale_bits() const { return is_normal4() ? 8 : width.bits(); }
  __device__ float by_extreme() const {
    return is_normal4() ? Normal4Book::by_extreme() : width.by_extreme();
  }
  __device__ float by_opposite() const {
    return is_normal4() ? Normal4Book::by_opposite() : width.by_opposite<false>();
  }
  __device__ float clip() const {
    return is_normal4() ? Normal4Book::clip() : linear_clip(width.bits());
  }

  __device__ std::uint32_t code_of(int q) const {
    if (is_normal4()) return Normal4Book::code_of(q);
    const int half = 1 << (width.bits() - 1);
    return static_cast<std::uint32_t>(min(max(q - 128 + half, 0), 2 * half - 1));
  }
  __device__ float level_of(std::uint32_t code) const {
    if (is_normal4()) return Normal4Book::level_of(code);
    return static_cast<float>(static_cast<int>(code) - (1 << (width.bits() - 1)));
  }
};

// kBlock: as for Encoder.
template <int kBlock, class Book>
struct Search : Book {
  using Values = void;
  using Real = float;
  using DecodedBy = std::conditional_t<kBlock != 0, Decoder<4, kNormal4>, void>;
  static constexpr bool kNanBits = false, kColumns = true, kDoubles = kBlock == 0;
  static constexpr bool kCostly = kBlock == 0, kBusy = kBlock == 0;
  Layout layout;

  __device__ void prepare() const {
    auto& tables = search_tables();
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    for (int first = warp * kLanes; first < SearchTables::kEntries; first += kThreads) {
      const int entry = first + lane_id();
      const std::uint32_t code = this->code_of(entry - SearchTables::kBelow);
      tables.codes[entry] = static_cast<std::uint8_t>(code);
      const float level = this->level_of(code);
      for (int i = 0; i < kLanes; ++i)
        tables.levels[first + i][lane_id()] = __shfl_sync(~0u, level, i);
    }
    __syncthreads();
  }

  template <int kVector, class Tile>
  __device__ bool encode(const Tile& tile, float (&values)[kPerLane], BodyWriter& out) const {
    if constexpr (kVector > 1) exchange<kVector>(tile.staging, values);
    if constexpr (Book::kAny)
      if (this->rotation.on) this->rotation.template turn<1>(tile, log2_block(), values);
    const auto [scale, found_nan] = best_scale(tile, values);
    write_codes(tile, values, scale, out);
    const int first = lane_id() * rows() * kLanes;  // value of block lane_id()
    if (first < tile.n) out.half_word(tile, layout.scale_offset(tile.first + first), scale.bits);
    return found_nan;
  }

 private:
  __device__ int log2_block() const {
    return kBlock ? std::countr_zero(unsigned{kBlock}) : layout.log2_block;
  }
  // Rows of 32 values in a block.
  __device__ int rows() const { return (1 << log2_block()) / kLanes; }

  __device__ std::uint32_t magnitude_of(const Extremes& found, float share) const {
    return scale_magnitude(found, this->scale_bits(), this->by_extreme(), this->by_opposite(),
                           share);
  }

  struct Found {
    Scale scale;  // of block lane_id()
    bool any_nan;
  };

  // What lanes need to know of another's block, for both scales.
  struct alignas(16) Trial {
    float inverses[2], scales[2];
  };

  // The bits of x / scale, rounded to an integer and shifted.
  __device__ static std::uint32_t rounded(float x, float inverse) {
    return __float_as_uint(x * inverse + kRound);
  }
  static constexpr std::uint32_t kLevelBytes = sizeof(float);
  static constexpr std::uint32_t kFirstEntry = kZeroCode - 128 - SearchTables::kBelow;

  template <class Tile>
  __device__ Found best_scale(const Tile& tile, float (&values)[kPerLane]) const {
    const Extremes found = extremes(values);
    const auto magnitude = magnitude_of(found, 1.0f);
    const auto less = magnitude_of(found, this->clip());
    // Lifting both scales with the values, and lowering the weight, changes no bit of the errors.
    const bool is_tiny = found.extreme() != 0 && less < kTinyScale;
    Scale scale = make_scale(found, magnitude, is_tiny, this->least_infinity());
    const Scale smaller = make_scale(found, less, is_tiny, this->least_infinity());
    const float lift = is_tiny ? kLift : 1.0f;
    // Relative to the extreme, or an error's square would under- or overflow.
    const float extreme = __uint_as_float(found.extreme());
    float weight = extreme > 0x1p-120f ? __fdiv_rn(1.0f, extreme) : 0x1p120f;
    if (is_tiny) weight *= 1.0f / kLift;
    const bool any_nan = __any_sync(~0u, scale.is_nan);
    if (__any_sync(~0u, is_tiny | scale.is_nan)) {
#pragma unroll
      for (int m = 0; m < kPerLane; ++m) {
        values[m] *= __shfl_sync(~0u, lift, m / rows());
        if (__shfl_sync(~0u, scale.is_nan, m / rows())) values[m] = 0.0f;
      }
    }
    auto* const trials = reinterpret_cast<Trial*>(tile.staging);
    __syncwarp();
    trials[lane_id()] = {
        {scale.inverse, smaller.inverse},
        {__uint_as_float(scale.bits << 16) * lift, __uint_as_float(smaller.bits << 16) * lift}};
    __syncwarp();
    const bool take_smaller = smaller_is_better(trials, weight, values);
    __syncwarp();
    return {take_smaller ? smaller : scale, any_nan};
  }

  // Whether block lane_id() has the smaller error with the smaller scale.
  __device__ bool smaller_is_better(const Trial* trials, float weight,
                                    const float (&values)[kPerLane]) const {
    // By the address of a lane's levels, in which the upper bits of rounded() cancel out.
    const auto* const levels = search_tables().levels;
    // Through a shuffle, or the compiler adds up its terms anew for each value.
    const std::uint32_t origin =
        __shfl_sync(~0u,
                    static_cast<std::uint32_t>(__cvta_generic_to_shared(levels)) +
                        lane_id() * kLevelBytes - kFirstEntry * (kLanes * kLevelBytes),
                    lane_id());
    constexpr int kErrors = kBlock ? 2 * kTileValues / kBlock : 2;
    float errors[kErrors], weight_of_block = 0.0f;
    Trial trial;
    bool found = false;
#pragma unroll
    for (int m = 0; m < kPerLane; ++m) {
      const int block = m / rows(), at = kBlock ? 2 * block : 0;
      if (m % rows() == 0) {
        trial = trials[block];
        weight_of_block = __shfl_sync(~0u, weight, block);
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float level = read_shared<true>(origin + rounded(values[m], trial.inverses[t]) *
                                                           (kLanes * kLevelBytes));
        // level * scale is exact: fused or not, the difference is rounded once.
        const float error = __fmaf_rn(-level, trial.scales[t], values[m]) * weight_of_block;
        errors[at + t] = m % rows() == 0 ? error * error : errors[at + t] + error * error;
      }
      if (kBlock || (m + 1) % rows()) continue;
      const bool less = second_is_less<kErrors>(add_lanes<kLanes / 2>(errors), 0);
      if (lane_id() == block) found = less;
    }
    return kBlock ? second_is_less<kErrors>(add_lanes<kLanes / 2>(errors), lane_id()) : found;
  }

  // Of pair number `pair` in what add_lanes() made of kErrors.
  template <int kErrors>
  __device__ static bool second_is_less(float errors, int pair) {
    constexpr int kLanesOfEach = kLanes / kErrors;
    const float first = __shfl_sync(~0u, errors, 2 * pair * kLanesOfEach);
    return __shfl_sync(~0u, errors, (2 * pair + 1) * kLanesOfEach) < first;
  }

  // Of block lane_id().
  __device__ Extremes extremes(const float (&values)[kPerLane]) const {
    Extremes mine{0, kSign};
    std::uint32_t positive = 0, negative = kSign;
#pragma unroll
    for (int m = 0; m < kPerLane; ++m) {
      positive = Signed::largest(positive, __float_as_uint(values[m]));
      negative = Unsigned::largest(negative, __float_as_uint(values[m]));
      if ((m + 1) % rows()) continue;
      positive = Signed::largest_of_warp(positive);
      negative = Unsigned::largest_of_warp(negative);
      if (lane_id() == m / rows()) mine = {positive, negative};
      positive = 0;
      negative = kSign;
    }
    return {mine.positive, mine.negative ^ kSign};
  }

  // The code of value m, under the inverse of its block's scale.
  template <class Tile>
  __device__ std::uint32_t code_of_value(const Tile& tile, int m, float value,
                                         float inverse) const {
    const std::uint32_t code = search_tables().codes[rounded(value, inverse) - kFirstEntry];
    return !Tile::kDirect && m * kLanes + lane_id() >= tile.n ? 0 : code;
  }

  template <class Tile>
  __device__ void write_codes(const Tile& tile, const float (&values)[kPerLane], const Scale& scale,
                              BodyWriter& out) const {
    if constexpr (Book::kAny)
      if (!this->is_normal4()) return write_any_codes(tile, values, scale, out);
    write_normal4_codes(tile, values, scale, out);
  }

  // Word w of a lane has the codes of values 8 w to 8 w + 7, which are spread over the tile; eight
  // lanes exchange them for neighbours.
  template <class Tile>
  __device__ void write_normal4_codes(const Tile& tile, const float (&values)[kPerLane],
                                      const Scale& scale, BodyWriter& out) const {
    float inverse = 0.0f;
    Chunk<4> words[kPerLane / 8];
#pragma unroll
    for (int w = 0; w < kPerLane / 8; ++w) {
      std::uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int m = 8 * w + i;
        if (m % rows() == 0) inverse = __shfl_sync(~0u, scale.inverse, m / rows());
        word = __funnelshift_r(word, code_of_value(tile, m, values[m], inverse), 4);
      }
      words[w] = {transpose_codes(word)};
    }
    const int place = lane_id() % 8 * 4 + lane_id() / 8;
    out.rows(tile, tile.first / 2, layout.code_bytes, words, place);
  }

  template <class Tile>
  __device__ void write_any_codes(const Tile& tile, const float (&values)[kPerLane],
                                  const Scale& scale, BodyWriter& out) const {
    float inverse = 0.0f;
#pragma unroll
    for (int m = 0; m < kPerLane; ++m) {
      if (m % rows() == 0) inverse = __shfl_sync(~0u, scale.inverse, m / rows());
      tile.staging[m * kLanes + lane_id()] =
          static_cast<std::byte>(code_of_value(tile, m, values[m], inverse));
    }
    __syncwarp();
    auto bytes = read_chunk<kPerLane>(tile.staging);
    __syncwarp();
#pragma unroll
    for (std::uint32_t& field : bytes.words) field = join_bytes(field, this->width.bits());
    write_fields<false>(tile, layout, this->width.bits(), bytes.words, out);
  }
};

}  // namespace cccl::block_float::on_cuda
