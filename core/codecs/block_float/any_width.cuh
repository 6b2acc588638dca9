// Codes of any number of bits, packed and unpacked by a warp, and the encoder of such. A tile's
// codes are `bits` words for each lane, whatever the width: they change lanes in shared memory.
#pragma once

#include "codecs/block_float/block_float.cuh"
#include "codecs/block_float/rotate.cuh"

namespace cccl::block_float::on_cuda {

inline constexpr int kFieldCodes = 4, kFields = kPerLane / kFieldCodes;

// As FixedWidth, for kernels that serve all widths: there are that many fewer of them.
struct AnyWidth {
  int bits_of;
  float half, by_extreme_of, by_opposite_nearest, by_opposite_stochastic;
  std::uint32_t radix;  // 2^bits

  explicit AnyWidth(int bits)
      : bits_of(bits),
        half(half_of(bits)),
        by_extreme_of(1.0f / half),
        by_opposite_nearest(1.0f / reach_of(bits, false)),
        by_opposite_stochastic(1.0f / reach_of(bits, true)),
        radix(1u << bits) {}

  __device__ int bits() const { return bits_of; }
  __device__ float shift() const { return kRound + half; }
  __device__ float most() const { return kRound + (2 * half - 1); }
  __device__ float by_extreme() const { return by_extreme_of; }
  template <bool kStochastic>
  __device__ float by_opposite() const {
    return kStochastic ? by_opposite_stochastic : by_opposite_nearest;
  }
};

template <int kBitsOf>
struct Bits {
  static constexpr int kBits = kBitsOf;
};

// use(Bits<bits>): code for each width, of which a kernel runs one. kAll: 4 and 8 bits too.
template <bool kAll, class Use>
__device__ inline void with_bits(int bits, Use use) {
  if constexpr (kAll) {
    if (bits == 4) return use(Bits<4>{});
    if (bits == 8) return use(Bits<8>{});
  }
  switch (bits) {
    case 2: return use(Bits<2>{});
    case 3: return use(Bits<3>{});
    case 5: return use(Bits<5>{});
    default: return use(Bits<6>{});
  }
}

// kBits words of each lane, side by side in shared memory.
template <int kBits>
__device__ inline void write_own_words(std::byte* staging, const std::uint32_t (&words)[kBits]) {
  auto* const own = reinterpret_cast<std::uint32_t*>(staging) + lane_id() * kBits;
  if constexpr (kBits % 2 == 0) {
#pragma unroll
    for (int w = 0; w < kBits; w += 2)
      *reinterpret_cast<uint2*>(own + w) = make_uint2(words[w], words[w + 1]);
  } else {
#pragma unroll
    for (int w = 0; w < kBits; ++w) own[w] = words[w];
  }
}

template <int kBits>
__device__ inline void read_own_words(const std::byte* staging, std::uint32_t (&words)[kBits]) {
  const auto* const own = reinterpret_cast<const std::uint32_t*>(staging) + lane_id() * kBits;
  if constexpr (kBits % 2 == 0) {
#pragma unroll
    for (int w = 0; w < kBits; w += 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(own + w);
      words[w] = two.x;
      words[w + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int w = 0; w < kBits; ++w) words[w] = own[w];
  }
}

// A field is four codes side by side at the bottom of a word. Eight of them become words.
template <int kBits>
__device__ inline void join_fields(const std::uint32_t (&fields)[kFields],
                                   std::uint32_t (&words)[kBits]) {
  constexpr int kField = kFieldCodes * kBits;
#pragma unroll
  for (int w = 0; w < kBits; ++w) words[w] = 0;
#pragma unroll
  for (int f = 0; f < kFields; ++f) {
    const int w = f * kField / 32, at = f * kField % 32;
    words[w] |= fields[f] << at;
    if (at + kField > 32) words[w + 1] |= fields[f] >> (32 - at);
  }
}

// The codes of a row, or four of them, of which the low bits count, side by side.
template <int kCodes>
__device__ inline std::uint32_t join_codes(const std::uint32_t* codes, std::uint32_t radix) {
  std::uint32_t word = codes[kCodes - 1], upper = kZeroCode;
#pragma unroll
  for (int i = kCodes - 2; i >= 0; --i) {
    word = word * radix + codes[i];
    upper = upper * radix + kZeroCode;
  }
  return word - upper;
}

// Words whose two halves have `bits` bits each: those side by side.
__device__ inline std::uint32_t join_halves(std::uint32_t word, int bits) {
  return (word & 0xFFFFu) | word >> 16 << bits;
}

// Codes in the bytes of a word, as a field.
__device__ inline std::uint32_t join_bytes(std::uint32_t word, int bits) {
  return join_halves((word & 0x00FF00FFu) | (word >> 8 & 0x00FF00FFu) << bits, 2 * bits);
}

// What lanes made of rows of kVector values, a byte's room for each, becomes what belongs to 32
// values in sequence.
template <int kVector, int kParts>
__device__ inline Chunk<kPerLane> exchange_rows(std::byte* staging,
                                                const std::uint32_t (&parts)[kParts]) {
  constexpr int kRows = kPerLane / kVector, kInRow = kParts / kRows;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    Chunk<kVector> row;
#pragma unroll
    for (int i = 0; i < kInRow; ++i) row.words[i] = parts[k * kInRow + i];
    write_chunk<false>(staging + k * kLanes * kVector, row, lane_id());
  }
  __syncwarp();
  const auto own = read_chunk<kPerLane>(staging);
  __syncwarp();
  return own;
}

// Writes the codes of a tile, of which each lane has the fields of 32 in sequence.
template <bool kAll, class Tile>
__device__ inline void write_fields(const Tile& tile, const Layout& layout, int bits,
                                    const std::uint32_t (&fields)[kFields], BodyWriter& out) {
  with_bits<kAll>(bits, [&]<int kBits>(Bits<kBits>) {
    std::uint32_t words[kBits];
    join_fields(fields, words);
    write_own_words(tile.staging, words);
    __syncwarp();
    Chunk<4> rows[kBits];
#pragma unroll
    for (int k = 0; k < kBits; ++k) rows[k] = read_chunk<4>(tile.staging + k * kLanes * 4);
    __syncwarp();
    out.rows(tile, tile.first / 8 * kBits, layout.code_bytes, rows);
  });
}

// Encodes with a runtime width, rotated or not.
template <class Quantiser, int kBlock>
struct AnyEncoder : Blocks<kBlock> {
  using Values = void;
  using Real = float;
  static constexpr bool kNanBits = false, kCostly = kBlock == 0;
  Quantiser quantiser;
  Rotation rotation;

  __device__ void prepare() const {}
  __device__ void renew()
    requires Quantiser::kStochastic
  {
    quantiser.renew();
  }

  template <int kVector, class Tile>
  __device__ bool encode(const Tile& tile, float (&values)[kPerLane], BodyWriter& out) const {
    if (rotation.on) rotation.template turn<kVector>(tile, this->log2_block(), values);
    const int own = lane_id() << this->log2_block();  // the first value of block lane_id()
    const Extremes found = this->template extremes_of_own_block<kVector>(own, values);
    const Scale scale = linear_scale<Quantiser::kStochastic>(quantiser.width, found, kInfinity);
    const bool rare =
        __any_sync(~0u, scale.is_tiny || scale.is_nan || quantiser.exceeds(found, scale));
    if (rare) this->template make_ordinary<kVector>(scale, 1.0f, values);
    constexpr int kCodes = kVector < kFieldCodes ? kVector : kFieldCodes;
    std::uint32_t parts[kPerLane / kCodes];
    const auto take = [&](int k, const std::uint32_t (&codes)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector / kCodes; ++i)
        parts[k * (kVector / kCodes) + i] =
            join_codes<kCodes>(codes + i * kCodes, quantiser.width.radix);
    };
    if (!Tile::kDirect || Quantiser::kStochastic || rare)
      this->template quantise<true, kVector>(quantiser, tile, scale.inverse, values, take);
    else
      this->template quantise<false, kVector>(quantiser, tile, scale.inverse, values, take);
    const int bits = quantiser.width.bits();
    if constexpr (kVector == kPerLane) {
      write_fields<true>(tile, this->layout, bits, parts, out);
    } else {
      std::uint32_t fields[kFields];
      const auto found = exchange_rows<kVector>(tile.staging, parts);
#pragma unroll
      for (int f = 0; f < kFields; ++f)
        fields[f] = kCodes == 2 ? join_halves(found.words[f], 2 * bits) : found.words[f];
      write_fields<true>(tile, this->layout, bits, fields, out);
    }
    if (own < tile.n) out.half_word(tile, this->layout.scale_offset(tile.first + own), scale.bits);
    return scale.is_nan;
  }
};

}  // namespace cccl::block_float::on_cuda
