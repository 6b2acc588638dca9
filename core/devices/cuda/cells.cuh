// Cells: runs of values, each coded by itself into a body of its own within a payload. So another
// codec puts those of a tile codec into its payloads: the values pass through memory as floats,
// kCellValues to a cell.
#pragma once

#include "devices/cuda/kernels.cuh"
#include "devices/cuda/words.cuh"

namespace cccl::cuda {

inline constexpr int kCellValues = 2048;

// How many bytes a body has: codes up to a multiple of `unit`, then what each block has.
struct BodySize {
  int bits, unit = 1, per_block = 0, log2_block = 5;

  constexpr std::uint32_t codes(std::uint32_t values) const {
    return ((values * bits + 7) / 8 + unit - 1) / unit * unit;
  }
  constexpr std::uint32_t bytes(std::uint32_t values) const {
    return codes(values) + per_block * ((values + (1u << log2_block) - 1) >> log2_block);
  }
  // To whole words: where the next begins.
  constexpr std::uint32_t padded(std::uint32_t values) const { return (bytes(values) + 3) / 4 * 4; }
};

// Where a cell's body begins, in the payload's, and how many values it holds.
struct Cell {
  std::uint64_t offset;
  std::uint32_t values, unused;
};

// What has been written and found in a payload that a second kernel completes.
struct Begun {
  unsigned long long written;  // checksum
  std::uint64_t body_bytes;
  unsigned int flags;
};

struct CellsToEncode {
  const float* values;
  const Cell* cells;
  std::uint64_t count, position;  // cells; of the first one's values in the tensor
  BodySize size;
  const Begun* begun;
};

// Of each payload `count` cells, and as many in `values`.
struct CellsToDecode {
  float* values;
  const Cell* cells;
  std::uint64_t count;
  BodySize size;
};

// Tells a coder, where it must know, how long a cell's codes are.
template <class Coder>
__device__ inline void fit(Coder& coder, const BodySize& size, const Cell& cell) {
  if constexpr (requires(Coder& any) { any.layout.code_bytes; })
    coder.layout.code_bytes = size.codes(cell.values);
}

// step(cell's number, the cell, its tile) for each tile of this warp's cells, then last(cell's
// number, the cell).
template <class Step, class Last>
__device__ inline void for_cells(const Cell* cells, std::uint64_t count, Step step, Last last) {
  __shared__ alignas(kStagingBytes) std::byte staging[kWarps][kStagingBytes];
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * kWarps + warp; i < count;
       i += std::uint64_t{gridDim.x} * kWarps) {
    const Cell cell = cells[i];
    for (std::uint32_t first = 0; first < cell.values; first += kTileValues) {
      const int n = static_cast<int>(min(cell.values - first, std::uint32_t{kTileValues}));
      step(i, cell, WarpTile<false>{first, cell.values, first, cell.values, n, staging[warp]});
    }
    last(i, cell);
  }
}

template <class Encoder>
__global__ void __launch_bounds__(kThreads, kResidentCoder<Encoder, float>)
    encode_cells_kernel(__grid_constant__ const CellsToEncode task, Encoder encoder,
                        __grid_constant__ const Seal seal, __grid_constant__ const Sources sources,
                        Workspace* workspace) {
  encoder.prepare();
  begin();
  if constexpr (requires { encoder.renew(); }) encoder.renew();
  Totals totals = inspect(sources, nullptr);  // for their flags: sums of them are encoded here
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    totals.written = task.begun->written;
    totals.flags |= task.begun->flags;
  }
  std::byte* const body = seal.payload + sizeof(PayloadHeader);
  const WordReader written{body, reinterpret_cast<std::uintptr_t>(body) % 4 == 0};
  for_cells(
      task.cells, task.count,
      [&](std::uint64_t i, const Cell& cell, auto tile) {
        fit(encoder, task.size, cell);
        constexpr int kVector = kVectorRead<Encoder, float, false>;
        tile.position += task.position + i * kCellValues;
        typename Encoder::Real values[kPerLane];
        const auto* const from = reinterpret_cast<const std::byte*>(task.values + i * kCellValues);
        read_values<float, Encoder::kNanBits, kVector>(tile, from, values);
        std::uint64_t unused = 0;  // offsets are the payload's only below
        BodyWriter out(seal.payload + cell.offset, unused);
        if (encoder.template encode<kVector>(tile, values, out)) totals.flags |= kFoundNonFinite;
      },
      [&](std::uint64_t, const Cell& cell) {
        const auto bytes = task.size.bytes(cell.values), padded = task.size.padded(cell.values);
        if (bytes + lane_id() < padded) body[cell.offset + bytes + lane_id()] = std::byte{0};
        __syncwarp();
        for (std::uint32_t at = 4 * lane_id(); at < padded; at += 4 * kLanes)
          written.word(cell.offset + at, totals.written);
      });
  finish(workspace, totals, nullptr, &seal, &task.begun->body_bytes);
}

// Those of payload blockIdx.y. Checks nothing.
template <class Decoder>
__global__ void __launch_bounds__(kThreads, kResidentCoder<Decoder, float>)
    decode_cells_kernel(__grid_constant__ const CellsToDecode task, Decoder decoder,
                        __grid_constant__ const Sources sources) {
  constexpr int kVector = kChunkBytes / sizeof(float);
  begin();
  const std::uint64_t first = blockIdx.y * task.count;
  for_cells(
      task.cells + first, task.count,
      [&](std::uint64_t i, const Cell& cell, const auto& tile) {
        fit(decoder, task.size, cell);
        const BodyReader in(sources.payloads[blockIdx.y] + cell.offset);
        const auto fetched = decoder.template fetch<kVector>(tile, in);
        float values[kPerLane];
        decoder.template apply<kVector, false>(tile, fetched, values);
        auto* const to = reinterpret_cast<std::byte*>(task.values + (first + i) * kCellValues);
        write_values<float, false>(tile, to, values);
      },
      [](std::uint64_t, const Cell&) {});
}

}  // namespace cccl::cuda
