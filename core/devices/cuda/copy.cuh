// Payloads that hold their values as they are: bit patterns of NaN and -0.0 survive, and any dtype
// passes.
#pragma once

#include "devices/cuda/codec.cuh"

namespace cccl::cuda {

// A tile here has words for values: kRows rows of 16 bytes in each lane.
inline constexpr int kRows = kPerLane * 4 / kChunkBytes;

using Rows = Chunk<kChunkBytes>[kRows];

// step(tile, offset of its bytes) for each tile of this warp. A full last tile, whose last word is
// cut short, must not be taken for whole.
template <class Step>
__device__ void for_byte_tiles(Span span, std::uint64_t bytes, Step step) {
  span.aligned &= bytes % 4 == 0 || span.count % kTileValues != 0;
  for_tiles<true>(span, [&](const auto& tile) { step(tile, tile.first * 4); });
}

static __global__ void __launch_bounds__(kThreads)
    copy_in_kernel(__grid_constant__ const Parts<EncodePart> parts, std::uint64_t bytes,
                   Exponents exponents, __grid_constant__ const Sources sources,
                   Workspace* workspace) {
  const EncodePart& part = parts.mine();
  begin();
  Totals totals = inspect(sources, nullptr);  // for their flags: sums of them are copied here
  BodyWriter out(part.seal.payload, totals.written);
  for_byte_tiles(part.span, bytes, [&](const auto& tile, std::uint64_t offset) {
    Rows rows;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const std::uint64_t at = offset + k * kLanes * kChunkBytes;
      const auto left = static_cast<std::int64_t>(bytes - at);
      rows[k] = read_row<kChunkBytes>(tile, part.values + at, left);
    }
    bool found = false;
#pragma unroll
    for (const auto& row : rows)
#pragma unroll
      for (int i = 0; i < row.kWords; ++i) found |= has_non_finite(row.words[i], i, exponents);
    if (found) totals.flags |= kFoundNonFinite;
    out.rows(tile, offset, bytes, rows);
  });
  finish(workspace, totals, nullptr, &part.seal);
}

static __global__ void __launch_bounds__(kThreads)
    copy_out_kernel(__grid_constant__ const Parts<DecodePart> parts, std::uint64_t bytes,
                    Workspace* workspace, Report* report) {
  const DecodePart& part = parts.mine();
  begin();
  Totals totals = inspect(&part.payload, 1, part.expected, report);
  const BodyReader in(part.payload);
  for_byte_tiles(part.span, bytes, [&](const auto& tile, std::uint64_t offset) {
    Rows rows;
    in.rows(tile, offset, bytes, rows);
    totals.read += checksum_of(offset, lane_id(), rows);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const std::uint64_t at = offset + k * kLanes * kChunkBytes;
      const auto left = static_cast<std::int64_t>(bytes - at);
      write_row(tile, part.values + at, left, rows[k], lane_id());
    }
  });
  finish(workspace, totals, report, nullptr);
}

// What tiles are made of here.
inline std::uint64_t words_of(ConstValues values) { return (values.bytes() + 3) / 4; }

// `like`: values as each of the parts has them.
inline void copy_in(const Parts<EncodePart>& parts, std::size_t count, ConstValues like,
                    const Sources& sources, const CudaQueue& on) {
  launch(copy_in_kernel, on, tiles_of(words_of(like)), count, parts, std::uint64_t{like.bytes()},
         exponents_of(like.dtype), sources, on.workspace());
}

inline void copy_out(const Parts<DecodePart>& parts, std::size_t count, ConstValues like,
                     const CudaQueue& on) {
  launch(copy_out_kernel, on, tiles_of(words_of(like)), count, parts, std::uint64_t{like.bytes()},
         on.workspace(), on.report());
}

}  // namespace cccl::cuda
