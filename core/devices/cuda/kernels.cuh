// The kernels of every codec, over its Encoder and Decoder.
//
// struct Encoder {
//   using Values;                     the element type that it serves, or void for all
//   using Real;                       what it encodes: float or double
//   static constexpr bool kNanBits;   whether a NaN's own bits matter
//   void prepare() const;             fills the thread block's shared memory, if it needs any
//   // Encodes a tile; true if a value will decode to Inf or NaN.
//   template <int kVector>
//   bool encode(const Tile&, Real (&values)[kPerLane], BodyWriter&) const;
// };
// struct Decoder {
//   using Values;
//   static constexpr float kZero;     to which adding a first term gives what decoding it gives
//   static constexpr int kVector;     for rows that read the body in the widest accesses
//   template <int kVector> struct Fetched;
//   template <int kVector> Fetched<kVector> fetch(const Tile&, BodyReader&) const;
//   // values = or += what was fetched
//   template <int kVector, bool kAdd>
//   void apply(const Fetched<kVector>&, Real (&values)[kPerLane]) const;
// };
#pragma once

#include "devices/cuda/body.cuh"
#include "devices/cuda/finish.cuh"

namespace cccl::cuda {

// What all kernels know of their values.
struct Span {
  std::uint64_t count, position;
  bool aligned;  // every array and payload begins at a multiple of kChunkBytes
};

// What a sum of several payloads becomes. A power of two is multiplied by its exact reciprocal.
struct Mean {
  double divisor;
  float divisor_f, reciprocal_f;
  bool exact;           // the reciprocal is
  bool half_overflows;  // a sum beyond what float16 holds is an Inf
};

// Bodies are asked for this many tiles ahead, since beside a stream of writes a read takes long.
// More would only push each other out (measured: 3 tiles cost 10 %).
inline constexpr int kTilesAhead = 1;

// step(tile) for each tile that this warp has.
template <class Step>
__device__ inline void for_tiles(const Span& span, Step step) {
  __shared__ alignas(kChunkBytes) std::byte staging[kWarps][kStagingBytes];
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const std::uint64_t stride = std::uint64_t{gridDim.x} * kWarps * kTileValues;
  const std::uint64_t direct = span.aligned ? span.count / kTileValues * kTileValues : 0;
  std::uint64_t first = (std::uint64_t{blockIdx.x} * kWarps + warp) * kTileValues;
  for (; first < direct; first += stride)
    step(WarpTile<true>{first, span.count, span.position + first, first + kTilesAhead * stride,
                        kTileValues, nullptr});
  for (; first < span.count; first += stride) {
    const std::uint64_t left = span.count - first;
    const int n = static_cast<int>(left < kTileValues ? left : kTileValues);
    step(WarpTile<false>{first, span.count, span.position + first, span.count, n, staging[warp]});
  }
}

// Blocks that must fit a multiprocessor, so that enough loads are in flight. Doubles need the
// registers of all.
template <class T>
inline constexpr int kResident = sizeof(T) == sizeof(double) ? 1 : 3;

template <class Encoder, class T>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    encode_kernel(const std::byte* values, Span span, Encoder encoder,
                  __grid_constant__ const Seal seal, __grid_constant__ const Sources sources,
                  Workspace* workspace) {
  constexpr int kVector = kChunkBytes / sizeof(T);
  encoder.prepare();
  Totals totals = inspect(sources, nullptr);  // for their flags: sums of them are encoded here
  BodyWriter out(seal.payload, totals.written);
  for_tiles(span, [&](const auto& tile) {
    typename Encoder::Real tile_values[kPerLane];
    read_values<T, Encoder::kNanBits>(tile, values, tile_values);
    if (encoder.template encode<kVector>(tile, tile_values, out)) totals.flags |= kFoundNonFinite;
  });
  finish(workspace, totals, nullptr, &seal);
}

template <class Decoder, class T>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    decode_kernel(std::byte* values, Span span, Decoder decoder,
                  __grid_constant__ const Sources sources, Workspace* workspace, Report* report) {
  constexpr int kVector = kChunkBytes / sizeof(T);
  Totals totals = inspect(sources, report);
  BodyReader in(sources.payloads[0], totals.read);
  for_tiles(span, [&](const auto& tile) {
    SumOf<T> tile_values[kPerLane];
    const auto fetched = decoder.template fetch<kVector>(tile, in);
    decoder.template apply<kVector, false>(fetched, tile_values);
    write_values<T, true>(tile, values, tile_values);
  });
  finish(workspace, totals, report, nullptr);
}

__device__ inline void divide(const Mean& mean, float (&sums)[kPerLane]) {
  if (mean.exact) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sums[i] *= mean.reciprocal_f;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sums[i] = __fdiv_rn(sums[i], mean.divisor_f);
  }
}

__device__ inline void divide(const Mean& mean, double (&sums)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sums[i] = __ddiv_rn(sums[i], mean.divisor);
}

// Divides; then what float16 cannot hold becomes an Inf, and, where their bits matter, all NaNs
// one.
template <bool kNanBits, class Real>
__device__ inline void finish_mean(const Mean& mean, Real (&sums)[kPerLane]) {
  divide(mean, sums);
  if (mean.half_overflows) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (fabs(sums[i]) >= Real{65520}) sums[i] = copysign(Real{INFINITY}, sums[i]);
  }
  if constexpr (!kNanBits) return;
  bool special = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) special |= isnan(sums[i]);
  if (!special) return;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (isnan(sums[i])) sums[i] = nan_of<Real>();
}

// The mean of the sources' values in a tile. Several are fetched before the first is added.
template <int kVector, bool kNanBits, class Tile, class Decoder, class Real>
__device__ inline void mean_of_tile(const Tile& tile, const Sources& sources,
                                    const Decoder& decoder, const Mean& mean,
                                    std::uint64_t& checksum, Real (&sums)[kPerLane]) {
  using Fetched = typename Decoder::template Fetched<kVector>;
  constexpr int kTogether = sizeof(Fetched) > 64 ? 1 : sizeof(Fetched) > 24 ? 2 : 4;
  Fetched fetched[kTogether];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sums[i] = Decoder::kZero;
  for (int first = 0; first < sources.count; first += kTogether) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (first + j >= sources.count) break;
      BodyReader in(sources.payloads[first + j], checksum);
      fetched[j] = decoder.template fetch<kVector>(tile, in);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (first + j >= sources.count) break;
      decoder.template apply<kVector, true>(fetched[j], sums);
    }
  }
  finish_mean<kNanBits>(mean, sums);
}

template <class Decoder, class T>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    reduce_kernel(std::byte* values, Span span, Decoder decoder, Mean mean,
                  __grid_constant__ const Sources sources, Workspace* workspace, Report* report) {
  constexpr int kVector = kChunkBytes / sizeof(T);
  Totals totals = inspect(sources, report);
  for_tiles(span, [&](const auto& tile) {
    SumOf<T> sums[kPerLane];
    mean_of_tile<kVector, true>(tile, sources, decoder, mean, totals.read, sums);
    write_values<T, false>(tile, values, sums);
  });
  finish(workspace, totals, report, nullptr);
}

// A lane that holds a tile's 16- or 32-bit values beside their sums needs more registers than one
// that holds codes.
template <class Decoder>
inline constexpr int kResidentReencoding =
    sizeof(typename Decoder::template Fetched<Decoder::kVector>) < kPerLane * 2 ? 3 : 2;

template <class Decoder, class Encoder>
__global__ void __launch_bounds__(kThreads, kResidentReencoding<Decoder>)
    reduce_encode_kernel(Span span, Decoder decoder, Encoder encoder, Mean mean,
                         __grid_constant__ const Seal seal, __grid_constant__ const Sources sources,
                         Workspace* workspace, Report* report) {
  constexpr int kVector = Decoder::kVector;
  encoder.prepare();
  Totals totals = inspect(sources, report);
  BodyWriter out(seal.payload, totals.written);
  for_tiles(span, [&](const auto& tile) {
    float sums[kPerLane];
    mean_of_tile<kVector, Encoder::kNanBits>(tile, sources, decoder, mean, totals.read, sums);
    if (!std::decay_t<decltype(tile)>::kDirect) {  // a chunk may go on behind the last value
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if ((i / kVector * kLanes + lane_id()) * kVector + i % kVector >= tile.n) sums[i] = 0.0f;
    }
    if (encoder.template encode<kVector>(tile, sums, out)) totals.flags |= kFoundNonFinite;
  });
  finish(workspace, totals, report, &seal);
}

}  // namespace cccl::cuda
