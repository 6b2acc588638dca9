// Residuals of error feedback on the device: the bits of devices/cpu/residual.cpp. A kernel
// corrects values, encodes them, decodes what it wrote and keeps what that lost; what is not
// encoded tile by tile passes through memory between kernels that do the parts (residual.cu).
#pragma once

#include "api/residual.h"
#include "codecs/block_float/decoder.cuh"
#include "devices/cuda/kernels.cuh"

namespace cccl::cuda {

struct Correction {
  const std::byte* values;
  DType dtype;      // of `values`
  DType delivered;  // what readers take decoded values rounded to: float32 for as they are
  Residual residual;
};

// Whether its rows begin where wide accesses may.
inline bool is_aligned(const Residual& residual) {
  constexpr std::size_t kSizes[] = {4, 2, 1};  // of a value
  return residual.first * kSizes[static_cast<int>(residual.type)] % kChunkBytes == 0;
}

__device__ inline Residual resolve(Residual residual) {
  if (residual.swapped && *residual.swapped) {
    std::byte* const kept = residual.next;
    residual.next = const_cast<std::byte*>(residual.kept);
    residual.kept = kept;
  }
  return residual;
}

// Where the values of a tile are in the residual.
template <class Tile>
__device__ inline Tile in_residual(const Residual& residual, Tile tile) {
  tile.first += residual.first;
  tile.count = residual.count;
  return tile;
}

// Writes a tile of a residual of 8 bits, and nothing behind it: that may be another part's.
class ResidualWriter {
 public:
  __device__ explicit ResidualWriter(std::byte* body) : body_(body) {}

  template <int kBytes, int kRows, class Tile>
  __device__ void rows(const Tile& tile, std::uint64_t offset, std::uint64_t,
                       const Chunk<kBytes> (&rows)[kRows]) {
#pragma unroll
    for (int k = 0; k < kRows; ++k)
      write_row<kBytes>(tile, body_ + offset + k * (kLanes * kBytes),
                        std::int64_t{tile.n} - k * (kLanes * kBytes), rows[k], lane_id());
  }

  template <class Tile>
  __device__ void half_word(const Tile&, std::uint64_t offset, std::uint32_t bits) {
    *reinterpret_cast<std::uint16_t*>(body_ + offset) = static_cast<std::uint16_t>(bits);
  }

 private:
  std::byte* body_;
};

__device__ inline block_float::on_cuda::Layout layout_of(const Residual& residual) {
  return {std::countr_zero(block_float::kDefaultBlock), block_float::code_bytes(residual.count, 8)};
}

template <int kVector, class Tile>
__device__ inline void load_residual(const Residual& residual, const Tile& within,
                                     float (&values)[kPerLane]) {
  const Tile tile = in_residual(residual, within);
  switch (residual.type) {
    case ResidualType::kFloat32:
      return read_values<float, true, kVector>(tile, residual.kept, values);
    case ResidualType::kBFloat16:
      return read_values<BFloat, true, kVector>(tile, residual.kept, values);
    case ResidualType::kBlockFloat8: {
      const block_float::on_cuda::Decoder<8, block_float::kLinear> decoder{layout_of(residual)};
      const BodyReader in(residual.kept - sizeof(PayloadHeader));  // a body without a header
      const auto fetched = decoder.template fetch<kVector>(tile, in);
      decoder.template apply<kVector, false>(tile, fetched, values);
    }
  }
}

template <class T, int kVector, class Tile>
__device__ inline void write_rows(const Tile& tile, std::byte* array,
                                  const float (&values)[kPerLane]) {
  constexpr int kBytes = kVector * sizeof(T), kRow = kLanes * kBytes;
  std::byte* const to = array + tile.first * sizeof(T);
#pragma unroll
  for (int k = 0; k < kPerLane / kVector; ++k)
    write_row<kBytes>(tile, to + k * kRow, std::int64_t{tile.n} * sizeof(T) - k * kRow,
                      store<T, false, kVector>(values + k * kVector), lane_id());
}

template <int kVector, class Tile>
__device__ inline void store_residual(const Residual& residual, const Tile& within,
                                      float (&values)[kPerLane]) {
  using namespace block_float::on_cuda;
  const Tile tile = in_residual(residual, within);
  switch (residual.type) {
    case ResidualType::kFloat32: return write_rows<float, kVector>(tile, residual.next, values);
    case ResidualType::kBFloat16: return write_rows<BFloat, kVector>(tile, residual.next, values);
    case ResidualType::kBlockFloat8: {
      const Encoder<Nearest<FixedWidth<8>>, block_float::kDefaultBlock> encoder{
          {layout_of(residual)}, {}};
      ResidualWriter out(residual.next);
      encoder.template encode<kVector>(tile, values, out);
    }
  }
}

// Zeros behind the tile's end.
template <int kVector, class Tile, class Real>
__device__ inline void clear_behind(const Tile& tile, Real (&values)[kPerLane]) {
  if constexpr (!Tile::kDirect) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if ((i / kVector * kLanes + lane_id()) * kVector + i % kVector >= tile.n) values[i] = 0;
  }
}

// Values of that type, as floats.
template <int kVector, class Tile>
__device__ inline void read_floats(const Tile& tile, const std::byte* array, DType dtype,
                                   float (&values)[kPerLane]) {
  switch (dtype) {
    case DType::kFloat16: return read_values<Half, true, kVector>(tile, array, values);
    case DType::kBFloat16: return read_values<BFloat, true, kVector>(tile, array, values);
    default: return read_values<float, true, kVector>(tile, array, values);
  }
}

// A NaN keeps its bits and becomes quiet, as on a CPU.
__device__ inline float corrected(float value, float decay, float kept) {
  if (isnan(value)) return __uint_as_float(__float_as_uint(value) | 0x00400000u);
  return __fadd_rn(value, __fmul_rn(decay, kept));
}
__device__ inline double corrected(double value, float decay, float kept) {
  if (isnan(value)) return __longlong_as_double(__double_as_longlong(value) | 0x0008000000000000ll);
  return __dadd_rn(value, __dmul_rn(double{decay}, double{kept}));
}

template <class T>
__device__ inline void round_as(float (&values)[kPerLane]) {
  load<T, false, float, kPerLane>(store<T, true, kPerLane>(values), values);
}

__device__ inline void round_to(DType delivered, float (&values)[kPerLane]) {
  if (delivered == DType::kFloat16) round_as<Half>(values);
  if (delivered == DType::kBFloat16) round_as<BFloat>(values);
}

template <class Encoder, class Decoder>
__global__ void __launch_bounds__(kThreads, kResidentSums<float>)
    encode_corrected_kernel(__grid_constant__ const Correction task, Span span, Encoder encoder,
                            Decoder decoder, __grid_constant__ const Seal seal,
                            __grid_constant__ const Sources sources, Workspace* workspace) {
  constexpr int kVector = kChunkBytes / sizeof(float);
  encoder.prepare();
  begin();
  if constexpr (requires { encoder.renew(); }) encoder.renew();
  const Residual residual = resolve(task.residual);
  Totals totals = inspect(sources, nullptr);  // for their flags: sums of them are encoded here
  BodyWriter out(seal.payload, totals.written);
  const BodyReader in(seal.payload);
  for_tiles<true>(span, [&](const auto& tile) {
    float values[kPerLane], other[kPerLane];
    read_floats<kVector>(tile, task.values, task.dtype, values);
    load_residual<kVector>(residual, tile, other);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values[i] = corrected(values[i], residual.decay, other[i]);
    clear_behind<kVector>(tile, values);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) other[i] = values[i];
    if (encoder.template encode<kVector>(tile, other, out)) totals.flags |= kFoundNonFinite;
    __syncwarp();  // lanes read what others wrote
    decoder.template apply<kVector, false>(tile, decoder.template fetch<kVector>(tile, in), other);
    round_to(task.delivered, other);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) other[i] = values[i] - other[i];
    clear_behind<kVector>(tile, other);
    store_residual<kVector>(residual, tile, other);
  });
  if (residual.spoiled && (totals.flags & kFoundNonFinite)) *residual.spoiled = 1;
  finish(workspace, totals, nullptr, &seal);
}

}  // namespace cccl::cuda
