// The body of a payload, read or written with its checksum taken on the way. docs/FORMAT.md.
#pragma once

#include "devices/cuda/tile.cuh"

namespace cccl::cuda {

// What a chunk at `offset` of a body adds to its checksum. The sum is linear in the bytes, so a
// chunk may also be a part of a word.
template <int kBytes>
__device__ inline std::uint64_t checksum_of(std::uint64_t offset, const Chunk<kBytes>& chunk) {
  const std::uint32_t weight = static_cast<std::uint32_t>(offset >> 1) | 1;
  if constexpr (kBytes < 4) return std::uint64_t{chunk.words[0] << 8 * (offset % 4)} * weight;
  std::uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < Chunk<kBytes>::kWords; ++i)
    sum += std::uint64_t{chunk.words[i]} * (weight + 2 * i);
  return sum;
}

// Rows of at least one byte for each lane; a codec's small numbers one by one.
class BodyReader {
 public:
  __device__ explicit BodyReader(const std::byte* body) : body_(body) {}

  // `size`: of the part of the body that the row belongs to, from the body's start.
  template <int kBytes>
  __device__ Chunk<kBytes> row(const WarpTile& tile, std::uint64_t offset, std::uint64_t size) {
    const auto chunk =
        read_row<kBytes>(tile, body_ + offset, static_cast<std::int64_t>(size - offset));
    sum += checksum_of<kBytes>(offset + lane_id() * kBytes, chunk);
    return chunk;
  }

  // 16 bits at an even offset, which count for the checksum where `counts`.
  __device__ std::uint32_t half_word(const WarpTile& tile, std::uint64_t offset, bool counts) {
    const std::byte* const at = body_ + offset;
    const std::uint32_t bits = tile.direct ? __ldg(reinterpret_cast<const std::uint16_t*>(at))
                                           : static_cast<std::uint32_t>(at[0]) |
                                                 static_cast<std::uint32_t>(at[1]) << 8;
    if (counts) sum += checksum_of<2>(offset, {bits});
    return bits;
  }

  std::uint64_t sum = 0;

 private:
  const std::byte* body_;
};

class BodyWriter {
 public:
  __device__ explicit BodyWriter(std::byte* body) : body_(body) {}

  // What lies behind the part's `size` must be zero in `chunk`, and is not written.
  template <int kBytes>
  __device__ void row(const WarpTile& tile, std::uint64_t offset, std::uint64_t size,
                      const Chunk<kBytes>& chunk, int place = lane_id()) {
    write_row<kBytes>(tile, body_ + offset, static_cast<std::int64_t>(size - offset), chunk, place);
    sum += checksum_of<kBytes>(offset + place * kBytes, chunk);
  }

  __device__ void half_word(const WarpTile& tile, std::uint64_t offset, std::uint32_t bits) {
    std::byte* const at = body_ + offset;
    if (tile.direct) {
      *reinterpret_cast<std::uint16_t*>(at) = static_cast<std::uint16_t>(bits);
    } else {
      at[0] = static_cast<std::byte>(bits);
      at[1] = static_cast<std::byte>(bits >> 8);
    }
    sum += checksum_of<2>(offset, {bits});
  }

  std::uint64_t sum = 0;

 private:
  std::byte* body_;
};

}  // namespace cccl::cuda
