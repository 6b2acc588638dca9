// How a warp holds a tile: rows of kVector values in each of its lanes, so that every access to
// memory is one coalesced row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "devices/cuda/values.cuh"

namespace cccl::cuda {

inline constexpr int kLanes = 32;
inline constexpr int kPerLane = 32;                    // values of a tile in each lane
inline constexpr int kTileValues = kLanes * kPerLane;  // a multiple of every block size

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % kLanes); }

// Values [first, first + n) of a payload of `count`. Value v of row k in lane l is number
// (k * kLanes + l) * kVector + v of the tile. A direct tile is full and all its memory is aligned;
// the rows of others go through `staging`, kStagingBytes of shared memory, which encoders may use
// too.
template <bool kDirectRows>
struct WarpTile {
  static constexpr bool kDirect = kDirectRows;
  std::uint64_t first, count, position;
  std::uint64_t ahead;  // the first value of a tile that this warp will read later, or >= count
  int n;
  std::byte* staging;
};

inline constexpr int kChunkBytes = 16;                          // the widest access of a lane
inline constexpr int kStagingBytes = 2 * kLanes * kChunkBytes;  // the widest row

template <int kBytes>
using Access = std::conditional_t<
    kBytes == 1, std::uint8_t,
    std::conditional_t<kBytes == 2, std::uint16_t,
                       std::conditional_t<kBytes == 4, std::uint32_t,
                                          std::conditional_t<kBytes == 8, uint2, uint4>>>>;

// A chunk of a row at an aligned address.
template <int kBytes>
__device__ inline Chunk<kBytes> read_chunk(const std::byte* row) {
  static_assert(kBytes <= 4 || kBytes % 8 == 0);
  using Word = Access<kBytes>;
  constexpr int kWords = kBytes / sizeof(Word);
  Chunk<kBytes> chunk;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const Word word = reinterpret_cast<const Word*>(row)[lane_id() * kWords + i];
    if constexpr (sizeof(Word) <= 4)
      chunk.words[0] = word;
    else
      std::memcpy(chunk.words + i * sizeof(Word) / 4, &word, sizeof word);
  }
  return chunk;
}

// kStreaming: nobody will read it soon.
template <bool kStreaming, int kBytes>
__device__ inline void write_chunk(std::byte* row, const Chunk<kBytes>& chunk, int place) {
  using Word = Access<kBytes>;
  constexpr int kWords = kBytes / sizeof(Word);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    Word word;
    if constexpr (sizeof(Word) <= 4)
      word = static_cast<Word>(chunk.words[0]);
    else
      std::memcpy(&word, chunk.words + i * sizeof(Word) / 4, sizeof word);
    Word* const at = reinterpret_cast<Word*>(row) + place * kWords + i;
    if constexpr (kStreaming)
      __stcs(at, word);
    else
      *at = word;
  }
}

// The warp copies `bytes` bytes at any alignment, by words where it can.
static __device__ __noinline__ void copy_bytes(std::byte* to, const std::byte* from, int bytes) {
  const auto both = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  const int in_words = both % 4 == 0 ? bytes / 4 : 0;
  for (int i = lane_id(); i < in_words; i += kLanes)
    reinterpret_cast<std::uint32_t*>(to)[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
  for (int i = 4 * in_words + lane_id(); i < bytes; i += kLanes) to[i] = from[i];
}

__device__ inline int clamp_bytes(std::int64_t bytes, int most) {
  return static_cast<int>(bytes < 0 ? 0 : bytes < most ? bytes : most);
}

// A row of kBytes for each lane. `valid` bytes of it exist; the rest reads as zeros.
template <int kBytes, class Tile>
__device__ inline Chunk<kBytes> read_row(const Tile& tile, const std::byte* row,
                                         std::int64_t valid) {
  if constexpr (Tile::kDirect) return read_chunk<kBytes>(row);
  const int bytes = clamp_bytes(valid, kLanes * kBytes);
  copy_bytes(tile.staging, row, bytes);
  for (int i = bytes + lane_id(); i < kLanes * kBytes; i += kLanes) tile.staging[i] = std::byte{0};
  __syncwarp();
  const auto chunk = read_chunk<kBytes>(tile.staging);
  __syncwarp();
  return chunk;
}

// `place`: of this lane's chunk in the row.
template <int kBytes, class Tile>
__device__ inline void write_row(const Tile& tile, std::byte* row, std::int64_t valid,
                                 const Chunk<kBytes>& chunk, int place) {
  if constexpr (Tile::kDirect) return write_chunk<true>(row, chunk, place);
  write_chunk<false>(tile.staging, chunk, place);
  __syncwarp();
  copy_bytes(row, tile.staging, clamp_bytes(valid, kLanes * kBytes));
  __syncwarp();
}

// The tile's values from an array of T, zeros behind its end.
template <class T, bool kNanBits, int kVector, class Tile, class Real>
__device__ inline void read_values(const Tile& tile, const std::byte* array,
                                   Real (&values)[kPerLane]) {
  constexpr int kBytes = kVector * sizeof(T), kRow = kLanes * kBytes;
  const std::byte* const from = array + tile.first * sizeof(T);
  Chunk<kBytes> rows[kPerLane / kVector];
#pragma unroll
  for (int k = 0; k < kPerLane / kVector; ++k)
    rows[k] = read_row<kBytes>(tile, from + k * kRow, std::int64_t{tile.n} * sizeof(T) - k * kRow);
#pragma unroll
  for (int k = 0; k < kPerLane / kVector; ++k)
    load<T, kNanBits, Real, kVector>(rows[k], values + k * kVector);
}

template <class T, bool kSaturate, class Tile, class Real>
__device__ inline void write_values(const Tile& tile, std::byte* array,
                                    const Real (&values)[kPerLane]) {
  constexpr int kVector = kChunkBytes / sizeof(T), kRow = kLanes * kChunkBytes;
  std::byte* const to = array + tile.first * sizeof(T);
#pragma unroll
  for (int k = 0; k < kPerLane / kVector; ++k)
    write_row<kChunkBytes>(tile, to + k * kRow, std::int64_t{tile.n} * sizeof(T) - k * kRow,
                           store<T, kSaturate, kVector>(values + k * kVector), lane_id());
}

}  // namespace cccl::cuda
