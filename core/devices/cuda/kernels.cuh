// The kernels of every codec, over its Encoder and Decoder.
//
// struct Encoder {
//   using Values;                     the element type that it serves, or void for all
//   using Real;                       what it encodes: float or double
//   static constexpr bool kNanBits;   whether a NaN's own bits matter
//   void prepare() const;             fills the thread block's shared memory, if it needs any
//   void renew();                     optional: reads what a kernel in front may have changed
//   static constexpr bool kDoubles;   optional: whether it is for float64 too
//   static constexpr bool kCostly;    optional: slow or seldom used, so little code is spent on it:
//                                     sums are encoded by a kernel of their own
//   static constexpr bool kBusy;      optional: encoding takes far longer than loading
//   // Optional: the bits of the least float that is taken for an Inf, and what values are to be
//   // multiplied with first, a power of two.
//   std::uint32_t infinity;
//   float factor;
//   using DecodedBy;                  optional: its Decoder, if one kernel is to encode, decode and
//                                     keep what was lost (residual.cuh); void: none is
//   // Encodes a tile; true if a value will decode to Inf or NaN.
//   template <int kVector>
//   bool encode(const Tile&, Real (&values)[kPerLane], BodyWriter&) const;
// };
// struct Decoder {
//   using Values;
//   static constexpr float kZero;     what a sum of no terms is
//   static constexpr int kVector;     for rows that read the body in the widest accesses
//   static constexpr bool kBusy;      optional: decoding takes far longer than loading
//   template <int kVector> struct Fetched;                                  of a tile, in a lane
//   template <int kVector> Fetched<kVector> fetch(const Tile&, const BodyReader&) const;
//   void prefetch(const Tile&, const BodyReader&) const;                    tile.ahead, later read
//   std::uint64_t checksum(const Tile&, const Fetched<kVector>&) const;     what it adds
//   template <int kVector, bool kAdd>
//   void apply(const Tile&, const Fetched<kVector>&, Real (&values)[kPerLane]) const;
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

// A payload to write from values, and one to read into values.
struct EncodePart {
  const std::byte* values;
  Span span;
  Seal seal;
};
struct DecodePart {
  std::byte* values;
  Span span;
  const std::byte* payload;
  PayloadHeader expected;
  bool is_near;  // the payload lies in this GPU's memory
};

// What a sum of several payloads becomes. A power of two is multiplied by its exact reciprocal.
struct Mean {
  double divisor;
  float divisor_f, reciprocal_f;
  bool exact;           // the reciprocal is
  bool moderate;        // the divisor and its reciprocal lie within 2^-40 and 2^40
  bool half_overflows;  // a sum beyond what float16 holds is an Inf
};

// A kernel may be launched before the one in front of it has ended: it waits here for that, and
// lets the next come so.
__device__ inline void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether whole tiles of aligned memory have code of their own. Doubles and costly encoders are
// seldom used, and their code would take up a tenth of a wheel.
template <class T>
inline constexpr bool kHasDirect = sizeof(T) < sizeof(double);

// step(tile, fetched, next) for each tile that this warp has, with what fetch(tile) returned. A
// step calls next() once it is done with `fetched`: where kPipelined, the loads for the next tile
// then run beside the rest of it.
template <bool kPipelined, bool kDirect, class Fetch, class Step>
__device__ inline void for_tiles(const Span& span, Fetch fetch, Step step) {
  __shared__ alignas(kStagingBytes) std::byte staging[kWarps][kStagingBytes];
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const std::uint64_t stride = std::uint64_t{gridDim.x} * kWarps * kTileValues;
  std::uint64_t first = (std::uint64_t{blockIdx.x} * kWarps + warp) * kTileValues;
  if constexpr (kDirect) {
    const std::uint64_t direct = span.aligned ? span.count / kTileValues * kTileValues : 0;
    const auto whole = [&](std::uint64_t at) {
      return WarpTile<true>{at,          span.count,  span.position + at,
                            at + stride, kTileValues, staging[warp]};
    };
    if (first < direct) {
      auto fetched = fetch(whole(first));
      for (;;) {
        const std::uint64_t following = first + stride;
        step(whole(first), fetched, [&] {
          if (kPipelined && following < direct) fetched = fetch(whole(following));
        });
        first = following;
        if (first >= direct) break;
        if (!kPipelined) fetched = fetch(whole(first));
      }
    }
  }
  for (; first < span.count; first += stride) {
    const std::uint64_t left = span.count - first;
    const int n = static_cast<int>(left < kTileValues ? left : kTileValues);
    const WarpTile<false> tile{first,      span.count, span.position + first,
                               span.count, n,          staging[warp]};
    auto fetched = fetch(tile);
    step(tile, fetched, [] {});
  }
}

// The same for steps that fetch nothing.
template <bool kDirect, class Step>
__device__ inline void for_tiles(const Span& span, Step step) {
  for_tiles<false, kDirect>(
      span, [](const auto&) { return 0; }, [&](const auto& tile, int, auto) { step(tile); });
}

// Blocks that must fit a multiprocessor, so that enough loads are in flight. Doubles need the
// registers of all; lanes that hold several payloads beside sums, and busy coders, those of two:
// spilled registers cost more than fewer warps (measured: up to 60 %).
template <class T>
inline constexpr int kResident = sizeof(T) == sizeof(double) ? 1 : 3;
template <class T>
inline constexpr int kResidentSums = sizeof(T) == sizeof(double) ? 1 : 2;

template <class Coder>
inline constexpr bool kIsBusy = false;
template <class Coder>
  requires(Coder::kBusy)
inline constexpr bool kIsBusy<Coder> = true;

template <class Encoder>
inline constexpr bool kIsCostly = false;
template <class Encoder>
  requires(Encoder::kCostly)
inline constexpr bool kIsCostly<Encoder> = true;

template <class Coder, class T>
inline constexpr int kResidentCoder = kIsBusy<Coder> ? kResidentSums<T> : kResident<T>;

// What a row has in each lane where values are read. Encoders that have lanes hold every 32nd value
// get them so, in small accesses: that costs less than an exchange.
template <class Encoder, class T, bool kDirect>
inline constexpr int kVectorRead = !requires { Encoder::kColumns; } ? kChunkBytes / sizeof(T)
                                   : kDirect                        ? 1
                                   : sizeof(T) > 4                  ? 4
                                                                    : kChunkBytes / sizeof(T);

template <class Encoder, class T>
__global__ void __launch_bounds__(kThreads, kResidentCoder<Encoder, T>)
    encode_kernel(__grid_constant__ const Parts<EncodePart> parts, Encoder encoder,
                  __grid_constant__ const Sources sources, Workspace* workspace) {
  const EncodePart& part = parts.mine();
  encoder.prepare();
  begin();
  if constexpr (requires { encoder.renew(); }) encoder.renew();
  Totals totals = inspect(sources, nullptr);  // for their flags: sums of them are encoded here
  BodyWriter out(part.seal.payload, totals.written);
  for_tiles<kHasDirect<T> && !kIsCostly<Encoder>>(part.span, [&](const auto& tile) {
    constexpr int kVector = kVectorRead<Encoder, T, std::decay_t<decltype(tile)>::kDirect>;
    typename Encoder::Real tile_values[kPerLane];
    read_values<T, Encoder::kNanBits, kVector>(tile, part.values, tile_values);
    if (encoder.template encode<kVector>(tile, tile_values, out)) totals.flags |= kFoundNonFinite;
  });
  finish(workspace, totals, nullptr, &part.seal);
}

template <class Decoder, class T>
__global__ void __launch_bounds__(kThreads, kResidentCoder<Decoder, T>)
    decode_kernel(__grid_constant__ const Parts<DecodePart> parts, Decoder decoder,
                  Workspace* workspace, Report* report) {
  constexpr int kVector = kChunkBytes / sizeof(T);
  const DecodePart& part = parts.mine();
  begin();
  Totals totals = inspect(&part.payload, 1, part.expected, report);
  const BodyReader in(part.payload);
  for_tiles<false, kHasDirect<T>>(
      part.span,
      [&](const auto& tile) {
        // Beside a stream of writes a read takes long. Asking for more than the next tile would
        // push that out again (measured: 3 tiles cost 10 %); where little is written it costs too.
        if (std::decay_t<decltype(tile)>::kDirect && part.is_near && tile.ahead < tile.count)
          decoder.prefetch(tile, in);
        return decoder.template fetch<kVector>(tile, in);
      },
      [&](const auto& tile, const auto& fetched, auto) {
        SumOf<T> tile_values[kPerLane];
        totals.read += decoder.checksum(tile, fetched);
        decoder.template apply<kVector, false>(tile, fetched, tile_values);
        write_values<T, true>(tile, part.values, tile_values);
      });
  finish(workspace, totals, report, nullptr);
}

// x / divisor, rounded to nearest: two steps from the product with the rounded reciprocal, the last
// of which rounds right (Markstein) as long as no intermediate result is denormal or infinite.
__device__ inline float quotient(const Mean& mean, float x) {
  float q = x * mean.reciprocal_f;
#pragma unroll
  for (int step = 0; step < 2; ++step)
    q = __fmaf_rn(__fmaf_rn(-mean.divisor_f, q, x), mean.reciprocal_f, q);
  return q;
}

// Whether quotient() may be wrong: of -0 too, but not of 0.
__device__ inline bool is_delicate(float x) {
  constexpr std::uint32_t kLeast = 0x19800000u, kMost = 0x66000000u;  // 2^-76, 2^77
  const std::uint32_t bits = __float_as_uint(x);
  return bits != 0 && (bits & 0x7FFFFFFFu) - kLeast >= kMost - kLeast;
}

__device__ inline void divide(const Mean& mean, float (&sums)[kPerLane]) {
  if (mean.exact) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sums[i] *= mean.reciprocal_f;
    return;
  }
  bool delicate = !mean.moderate;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) delicate |= is_delicate(sums[i]);
  if (!delicate) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sums[i] = quotient(mean, sums[i]);
    return;
  }
  // Rare: one piece of code, through which the values are passed on.
#pragma unroll 1
  for (int turn = 0; turn < kPerLane; ++turn) {
    const float divided = __fdiv_rn(sums[0], mean.divisor_f);
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) sums[i - 1] = sums[i];
    sums[kPerLane - 1] = divided;
  }
}

__device__ inline void divide(const Mean& mean, double (&sums)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sums[i] = __ddiv_rn(sums[i], mean.divisor);
}

// The bits of the least float that is an Inf in float16.
inline constexpr std::uint32_t kHalfInfinity = 0x477FF000u;  // 65520

// What float16 cannot hold becomes an Inf.
template <class Real>
__device__ inline void overflow_half(Real (&sums)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (fabs(sums[i]) >= Real{65520}) sums[i] = copysign(Real{INFINITY}, sums[i]);
}

// All NaNs become one.
template <class Real>
__device__ inline void unite_nans(Real (&sums)[kPerLane]) {
  bool special = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) special |= isnan(sums[i]);
  if (!special) return;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (isnan(sums[i])) sums[i] = nan_of<Real>();
}

// A tile of kCount sources: all of them are asked for before the first is used.
template <class Decoder, int kVector, int kCount>
struct Terms {
  typename Decoder::template Fetched<kVector> fetched[kCount];

  // Of sources `first` and on.
  template <class Tile>
  __device__ void fetch(const Tile& tile, const Sources& sources, int first,
                        const Decoder& decoder) {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      fetched[j] = decoder.template fetch<kVector>(tile, BodyReader(sources.payloads[first + j]));
  }

  template <class Tile, class Real>
  __device__ void add(const Tile& tile, const Decoder& decoder, std::uint64_t& checksum,
                      Real (&sums)[kPerLane]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      checksum += decoder.checksum(tile, fetched[j]);
      decoder.template apply<kVector, true>(tile, fetched[j], sums);
    }
  }
};

// step(tile, sums of the sources' values) for each tile of this warp.
template <int kVector, class Real, class Decoder, class Step>
__device__ inline void for_sums(const Span& span, const Sources& sources, const Decoder& decoder,
                                std::uint64_t& checksum, Step step) {
  using One = Terms<Decoder, kVector, 1>;
  // As many as registers have room for; one where so much is done with it that others can wait.
  constexpr int kFit = sizeof(One) <= 40 ? 4 : sizeof(One) <= 64 ? 2 : 1;
  constexpr int kMost = kIsBusy<Decoder> ? 1 : kFit;
  using Group = Terms<Decoder, kVector, kMost>;
  const bool grouped = sources.count >= kMost;
  for_tiles<true, kHasDirect<Real>>(
      span,
      [&](const auto& tile) {
        Group group;
        if (std::decay_t<decltype(tile)>::kDirect && grouped)
          group.fetch(tile, sources, 0, decoder);
        return group;
      },
      [&](const auto& tile, Group& group, auto next) {
        Real sums[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) sums[i] = Decoder::kZero;
        int first = 0;
        if (std::decay_t<decltype(tile)>::kDirect && grouped) {
#pragma unroll 1
          for (;;) {
            group.add(tile, decoder, checksum, sums);
            first += kMost;
            if (first + kMost > sources.count) break;
            group.fetch(tile, sources, first, decoder);
          }
        }
#pragma unroll 1
        for (; first < sources.count; ++first) {
          One one;
          one.fetch(tile, sources, first, decoder);
          one.add(tile, decoder, checksum, sums);
        }
        next();
        step(tile, sums);
      });
}

template <class Decoder, class T>
__global__ void __launch_bounds__(kThreads, kResidentSums<T>)
    reduce_kernel(std::byte* values, Span span, Decoder decoder, Mean mean,
                  __grid_constant__ const Sources sources, Workspace* workspace, Report* report) {
  constexpr int kVector = kChunkBytes / sizeof(T);
  begin();
  Totals totals = inspect(sources, report);
  for_sums<kVector, SumOf<T>>(span, sources, decoder, totals.read,
                              [&](const auto& tile, auto& sums) {
                                divide(mean, sums);
                                if (mean.half_overflows) overflow_half(sums);
                                unite_nans(sums);
                                write_values<T, false>(tile, values, sums);
                              });
  finish(workspace, totals, report, nullptr);
}

template <class Decoder, class Encoder>
__global__ void __launch_bounds__(kThreads, kResidentSums<float>)
    reduce_encode_kernel(Span span, Decoder decoder, Encoder encoder, Mean mean,
                         __grid_constant__ const Seal seal, __grid_constant__ const Sources sources,
                         Workspace* workspace, Report* report) {
  constexpr int kVector = Decoder::kVector;
  encoder.prepare();
  begin();
  if constexpr (requires { encoder.renew(); }) encoder.renew();
  Totals totals = inspect(sources, report);
  BodyWriter out(seal.payload, totals.written);
  // What the encoder can do with a block's scale needs no instruction for each value.
  constexpr bool kMultiplies = requires { encoder.factor; };
  constexpr bool kSeesInfinities = requires { encoder.infinity; };
  const bool divided = kMultiplies && mean.exact && mean.moderate;
  if constexpr (kMultiplies)
    if (divided) encoder.factor = mean.reciprocal_f;
  if constexpr (kSeesInfinities)
    if (mean.half_overflows) encoder.infinity = kHalfInfinity;
  for_sums<kVector, float>(span, sources, decoder, totals.read, [&](const auto& tile, auto& sums) {
    if (!divided) divide(mean, sums);
    if (!kSeesInfinities && mean.half_overflows) overflow_half(sums);
    if (Encoder::kNanBits) unite_nans(sums);
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
