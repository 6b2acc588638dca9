// The body of a payload, read or written, and its checksum. docs/FORMAT.md.
#pragma once

#include <cstddef>

#include "api/payload.h"
#include "devices/cuda/tile.cuh"

namespace cccl::cuda {

inline constexpr int kLineBytes = 128;  // of the second-level cache

// The weight of the word at `offset`. Two lanes or rows that are n bytes apart differ by n / 2.
__device__ inline std::uint32_t weight_at(std::uint64_t offset) {
  return static_cast<std::uint32_t>(offset >> 1) | 1;
}

// What rows add to a checksum if the first begins at `offset`. The sum is linear in the bytes, so
// a chunk may also be a part of a word.
template <int kBytes, int kRows>
__device__ inline std::uint64_t checksum_of(std::uint64_t offset, int place,
                                            const Chunk<kBytes> (&rows)[kRows]) {
  const std::uint32_t weight = weight_at(offset + place * kBytes);
  const int shift = kBytes < 4 ? 8 * (place * kBytes % 4) : 0;
  std::uint64_t sum = 0;
#pragma unroll
  for (int k = 0; k < kRows; ++k)
#pragma unroll
    for (int i = 0; i < Chunk<kBytes>::kWords; ++i)
      sum +=
          std::uint64_t{rows[k].words[i] << shift} * (weight + k * (kLanes * kBytes / 2) + 2 * i);
  return sum;
}

__device__ inline std::uint64_t checksum_of(std::uint64_t offset, std::uint32_t half_word) {
  return std::uint64_t{half_word << 8 * (offset % 4)} * weight_at(offset);
}

// The body of a payload that is read. Loads only: what they bring is added to a checksum when it is
// used, so that no load waits for another.
class BodyReader {
 public:
  __device__ explicit BodyReader(const std::byte* payload)
      : body_(payload + sizeof(PayloadHeader)) {}

  // Rows from `offset` on, in a part of the body that ends at `size`.
  template <int kBytes, int kRows, class Tile>
  __device__ void rows(const Tile& tile, std::uint64_t offset, std::uint64_t size,
                       Chunk<kBytes> (&rows)[kRows]) const {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const std::uint64_t at = offset + k * (kLanes * kBytes);
      rows[k] = read_row<kBytes>(tile, body_ + at, static_cast<std::int64_t>(size - at));
    }
  }

  // 16 bits at an even offset.
  template <class Tile>
  __device__ std::uint32_t half_word(const Tile&, std::uint64_t offset) const {
    const std::byte* const at = body_ + offset;
    if constexpr (Tile::kDirect)
      return *reinterpret_cast<const std::uint16_t*>(at);
    else
      return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8;
  }

  // The seed in the payload's header.
  template <class Tile>
  __device__ std::uint64_t seed(const Tile&) const {
    const std::byte* const at = body_ - sizeof(PayloadHeader) + offsetof(PayloadHeader, seed);
    if constexpr (Tile::kDirect) return *reinterpret_cast<const std::uint64_t*>(at);
    std::uint64_t seed = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) seed |= static_cast<std::uint64_t>(at[i]) << 8 * i;
    return seed;
  }

  // Asks for the line of the cache at `offset` ahead of its time.
  __device__ void prefetch(std::uint64_t offset) const {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(body_ + offset));
  }

 private:
  const std::byte* body_;
};

class BodyWriter {
 public:
  __device__ BodyWriter(std::byte* payload, std::uint64_t& sum)
      : body_(payload + sizeof(PayloadHeader)), sum_(sum) {}

  // What lies behind `size` must be zero in `rows`, and is not written. `place`: of this lane's
  // chunks in their rows.
  template <int kBytes, int kRows, class Tile>
  __device__ void rows(const Tile& tile, std::uint64_t offset, std::uint64_t size,
                       const Chunk<kBytes> (&rows)[kRows], int place = lane_id()) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const std::uint64_t at = offset + k * (kLanes * kBytes);
      write_row<kBytes>(tile, body_ + at, static_cast<std::int64_t>(size - at), rows[k], place);
    }
    sum_ += checksum_of(offset, place, rows);
  }

  template <class Tile>
  __device__ void half_word(const Tile&, std::uint64_t offset, std::uint32_t bits) {
    std::byte* const at = body_ + offset;
    if constexpr (Tile::kDirect) {
      *reinterpret_cast<std::uint16_t*>(at) = static_cast<std::uint16_t>(bits);
    } else {
      at[0] = static_cast<std::byte>(bits);
      at[1] = static_cast<std::byte>(bits >> 8);
    }
    sum_ += checksum_of(offset, bits);
  }

 private:
  std::byte* body_;
  std::uint64_t& sum_;
};

}  // namespace cccl::cuda
