// A cell in a warp on the device: its elements, the places that are held, and how they are written
// down. FORMAT.md.
#pragma once

#include "codecs/sparse/sparse.h"
#include "devices/cuda/cells.cuh"
#include "devices/cuda/look_back.cuh"

namespace cccl::sparse {

using namespace cuda;

static_assert(kCell == kCellValues);
inline constexpr int kCellSize = kCellValues, kMaskWords = kCellSize / 32;

// Elements as what they are stored as.
template <std::size_t kBytes>
using Word = std::conditional_t<
    kBytes == 1, std::uint8_t,
    std::conditional_t<kBytes == 2, std::uint16_t,
                       std::conditional_t<kBytes == 4, std::uint32_t, std::uint64_t>>>;
template <class Element>
using WordOf = Word<sizeof(Element)>;

// What a warp keeps of a cell in shared memory.
template <class Element>
struct alignas(kChunkBytes) CellMemory {
  WordOf<Element> elements[kCellSize];
  union {
    std::uint32_t mask[kMaskWords];     // of places held
    std::uint8_t gaps[4 * kMaskWords];  // as an encoder writes them: fewer than a bitmap's bytes
  };
  std::uint16_t before[kMaskWords];  // values held in front of each word of the mask
  union {
    std::byte staging[kLanes * kChunkBytes];  // of a row that is not aligned or cut short
    std::uint16_t places[4 * kMaskWords];     // of the values held, where an encoder writes gaps
    std::uint32_t other_mask[kMaskWords], histogram[2 * kMaskWords];  // for top-k
  };
};

// How many cells a thread block has at a time, one in each of its first warps.
template <class Element>
inline constexpr int kCellsOfBlock = sizeof(Element) == 8 ? kWarps / 2 : kWarps;

// Dynamic shared memory of a thread block, and the cell in this warp's.
template <class Element>
inline constexpr std::size_t kMemory = kCellsOfBlock<Element> * sizeof(CellMemory<Element>);
template <class Element>
__device__ inline CellMemory<Element>& memory_of_warp(int warp) {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<CellMemory<Element>*>(memory)[warp % kCellsOfBlock<Element>];
}

// Values in cell `cell` of a tensor.
__device__ inline int values_in(std::uint64_t cell, std::uint64_t count) {
  return static_cast<int>(min(count - cell * kCellSize, std::uint64_t{kCellSize}));
}

// Element i of a chunk.
template <class Word, int kBytes>
__device__ inline Word word_at(const Chunk<kBytes>& chunk, int i) {
  if constexpr (sizeof(Word) == 8)
    return std::uint64_t{chunk.words[2 * i + 1]} << 32 | chunk.words[2 * i];
  else
    return static_cast<Word>(chunk.words[i * sizeof(Word) / 4] >> 8 * (i * sizeof(Word) % 4));
}

// What lanes in front of this one have, and all have.
__device__ inline std::uint32_t scan_lanes(std::uint32_t mine, std::uint32_t& all) {
  std::uint32_t upto = mine;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(~0u, upto, step);
    if (lane_id() >= step) upto += other;
  }
  all = __shfl_sync(~0u, upto, kLanes - 1);
  return upto - mine;
}

// A lane looks after two words of a mask: the places from 64 * lane_id() on.
__device__ inline std::uint64_t own_places(const std::uint32_t* mask) {
  return std::uint64_t{mask[2 * lane_id() + 1]} << 32 | mask[2 * lane_id()];
}

// Completes memory.before, with what lanes in front hold.
template <class Element>
__device__ inline void write_before(CellMemory<Element>& memory, std::uint32_t in_front) {
  memory.before[2 * lane_id()] = static_cast<std::uint16_t>(in_front);
  memory.before[2 * lane_id() + 1] =
      static_cast<std::uint16_t>(in_front + __popc(memory.mask[2 * lane_id()]));
  __syncwarp();
}

// Which of kVector places from `place` on are held, in the low bits, and how many are in front.
struct Held {
  std::uint32_t bits;
  int rank;
};
template <class Element>
__device__ inline Held held_from(const CellMemory<Element>& memory, int place) {
  const std::uint32_t word = memory.mask[place / 32], bit = place % 32;
  return {word >> bit, memory.before[place / 32] + __popc(word & ((1u << bit) - 1))};
}

}  // namespace cccl::sparse
