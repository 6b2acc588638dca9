// A codec on CUDA devices. All that is not the codec's own is here once.
//
// A codec's .cu file gives
//   struct Kernels {
//     // use(encoder) and use(decoder): kernels.cuh's structs for values of args.in, or `dtype`.
//     template <class Use> void with_encoder(const EncodeArgs& args, Use use) const;
//     template <class Use> void with_decoder(DType dtype, std::uint64_t count, Use use) const;
//     // Optional, for what may be within another codec's payloads: the length of its bodies.
//     BodySize body_size(DType dtype) const;
//   };
// Their member type Values names the one element type that they serve, or is void for all.
// Names, options, sizes, bounds and headers are those of its CPU codec.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "api/codec.h"
#include "devices/cpu/cpu_codec.h"
#include "devices/cuda/cells.cuh"
#include "devices/cuda/check.h"
#include "devices/cuda/kernels.cuh"
#include "devices/cuda/queue.h"
#include "devices/cuda/residual.cuh"

namespace cccl::cuda {

// As many blocks as the device runs at once, if there is work for them, which `parts` share evenly.
// Where the hardware can, they come while the kernel in front of them ends (see begin()).
// `memory`: bytes of dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch_with(std::size_t memory, void (*kernel)(Parameters...), const CudaQueue& queue,
                 std::uint64_t tiles, std::size_t parts, const Arguments&... arguments) {
  const int device = queue.device().index;
  const std::uint64_t wanted = (tiles + kWarps - 1) / kWarps;
  const auto most =
      resident_blocks(reinterpret_cast<const void*>(kernel), kThreads, memory, device);
  int major = 0;
  CCCLIB_CUDA(cudaDeviceGetAttribute, &major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const auto each = std::clamp<std::uint64_t>(wanted, 1, std::max<std::uint64_t>(1, most / parts));
  config.gridDim = {static_cast<unsigned int>(each), static_cast<unsigned int>(parts), 1};
  config.blockDim = kThreads;
  config.dynamicSmemBytes = memory;
  config.stream = queue.stream();
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "a kernel launch");
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const CudaQueue& queue, std::uint64_t tiles,
            std::size_t parts, const Arguments&... arguments) {
  launch_with(0, kernel, queue, tiles, parts, arguments...);
}

// Memory of one call, in the order of its queue.
class Scratch {
 public:
  Scratch(std::size_t bytes, const CudaQueue& queue) : stream_(queue.stream()) {
    CCCLIB_CUDA(cudaMallocAsync, &memory_, std::max<std::size_t>(bytes, 1), stream_);
  }
  ~Scratch() { cudaFreeAsync(memory_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return memory_; }

 private:
  void* memory_ = nullptr;
  cudaStream_t stream_;
};

template <class... Pointers>
bool all_aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % kChunkBytes == 0) && ...);
}

inline std::uint64_t tiles_of(std::uint64_t count) {
  return (count + kTileValues - 1) / kTileValues;
}

inline Mean mean_of(double divisor, DType dtype) {
  int exponent;
  const auto single = static_cast<float>(divisor);
  const float reciprocal = 1.0f / single;
  const bool exact = std::abs(std::frexp(single, &exponent)) == 0.5f && std::isnormal(reciprocal);
  const bool moderate = std::abs(std::ilogb(single)) < 40;
  return {divisor, single, reciprocal, exact, moderate, dtype == DType::kFloat16};
}

// What one CUDA codec asks of another.
class CudaCodec : public Codec {
 public:
  explicit CudaCodec(std::shared_ptr<const Codec> reference)
      : reference_(std::move(reference)), on_cpu_(&dynamic_cast<const CpuCodec&>(*reference_)) {}

  const CodecInfo& info() const final { return reference_->info(); }
  std::string spec() const final { return reference_->spec(); }
  std::size_t granularity() const final { return reference_->granularity(); }
  bool supports(DType dtype) const final { return reference_->supports(dtype); }
  std::size_t max_encoded_bytes(std::size_t n, DType dtype) const final {
    return reference_->max_encoded_bytes(n, dtype);
  }
  void error_bound(ConstValues in, std::span<double> bound) const final {
    reference_->error_bound(in, bound);
  }

  // Encodes `values`, which are sums of the sources in their own type, as values of args.in.
  virtual std::size_t encode_sums(ConstValues values, const EncodeArgs& args,
                                  const Sources& sources, const CudaQueue& queue) const = 0;

  // Encodes like encode_sums(), corrected by a residual, which keeps what is lost; false where
  // there is no kernel for it. `delivered`: Correction::delivered.
  virtual bool encode_corrected(ConstValues, const EncodeArgs&, const Sources&, const Residual&,
                                std::optional<DType>, const CudaQueue&) const {
    return false;
  }
  // Values like `like` of a payload of this rank, as floats or doubles where that rounds less.
  virtual Values decode_unrounded(Bytes, void*, ConstValues, const CudaQueue&) const {
    throw Error("a codec that loses nothing leaves no residual");
  }

  // Cells of this codec within another's payload: the length of their bodies, and what writes them
  // and completes the payload, or reads them. Throw UnsupportedError where there is no code for it.
  virtual BodySize body_size(DType) const { refuse_cells(); }
  virtual void encode_cells(const CellsToEncode&, const EncodeArgs&, const Seal&, const Sources&,
                            const CudaQueue&) const {
    refuse_cells();
  }
  virtual void decode_cells(const CellsToDecode&, DType, const Sources&, const CudaQueue&) const {
    refuse_cells();
  }

 protected:
  Seal seal_of(const EncodeArgs& args) const {
    return {args.out.data(), on_cpu_->header_for(args), args.checksum};
  }

  // Throws CorruptPayloadError for lengths that no payload of these values has. Where sizes depend
  // on the values, the least of the payloads' lengths is the most that a body may have.
  Sources sources_of(std::span<const Bytes> payloads, std::size_t count, DType dtype) const {
    if (payloads.empty() || payloads.size() > kMaxSources)
      throw UnsupportedError("a CUDA reduction takes 1 to " + std::to_string(kMaxSources) +
                             " payloads, got " + std::to_string(payloads.size()));
    Sources sources{};
    const auto most = max_encoded_bytes(count, dtype);
    const auto least = info().fixed_size ? most : sizeof(PayloadHeader);
    auto body = most - sizeof(PayloadHeader);
    for (const Bytes payload : payloads) {
      if (payload.size() < least)
        throw CorruptPayloadError("payload truncated: " + std::to_string(payload.size()) +
                                  " bytes instead of " + std::to_string(least));
      body = std::min(body, payload.size() - sizeof(PayloadHeader));
      sources.payloads[sources.count++] = payload.data();
    }
    EncodeArgs like;
    like.in = {nullptr, count, dtype};
    like.out = {static_cast<std::byte*>(nullptr), most};
    sources.expected = on_cpu_->header_for(like);
    sources.expected.body_bytes = body;
    sources.any_size = !info().fixed_size;
    return sources;
  }

  // `units` are what tiles are made of.
  Parts<EncodePart> encode_parts(std::span<const EncodeArgs> args, std::uint64_t units) const {
    Parts<EncodePart> parts{};
    for (std::size_t i = 0; i < args.size(); ++i) {
      const auto* const from = static_cast<const std::byte*>(args[i].in.data);
      const bool aligned = all_aligned(from, args[i].out.data());
      parts.parts[i] = {from, {units, args[i].position, aligned}, seal_of(args[i])};
    }
    return parts;
  }
  Parts<DecodePart> decode_parts(std::span<const DecodeArgs> args, std::uint64_t units) const {
    Parts<DecodePart> parts{};
    for (std::size_t i = 0; i < args.size(); ++i) {
      const auto& [payload, out] = args[i];
      const auto expected = sources_of({&payload, 1}, out.count, out.dtype).expected;
      const bool aligned = all_aligned(payload.data(), out.data);
      parts.parts[i] = {
          static_cast<std::byte*>(out.data), {units, 0, aligned}, payload.data(), expected};
    }
    return parts;
  }

 private:
  [[noreturn]] void refuse_cells() const {
    throw UnsupportedError("codec '" + spec() + "' is not within others on CUDA devices");
  }

  std::shared_ptr<const Codec> reference_;
  const CpuCodec* on_cpu_;
};

template <class Coder, class T>
inline constexpr bool serves =
    std::is_void_v<typename Coder::Values> || std::is_same_v<typename Coder::Values, T>;

template <class Values>
struct SumsOf {
  using Type = SumOf<Values>;
};
template <>
struct SumsOf<void> {
  using Type = void;
};
template <class Coder, class T>
inline constexpr bool serves_sums =
    std::is_void_v<typename Coder::Values> ||
    std::is_same_v<typename SumsOf<typename Coder::Values>::Type, T>;

// Whether one kernel encodes with this encoder, and decodes again with that decoder.
template <class Encoder, class Decoder>
inline constexpr bool kDecodedBy = false;
template <class Encoder, class Decoder>
  requires requires { typename Encoder::DecodedBy; }
inline constexpr bool kDecodedBy<Encoder, Decoder> =
    std::is_same_v<typename Encoder::DecodedBy, Decoder>;

// Whether sums are encoded by the kernel that adds them up.
template <class Encoder>
inline constexpr bool kFused = true;
template <class Encoder>
  requires(Encoder::kCostly)
inline constexpr bool kFused<Encoder> = false;

template <class Kernels>
class CudaTileCodec : public CudaCodec {
 public:
  CudaTileCodec(std::shared_ptr<const Codec> reference, const Kernels& kernels)
      : CudaCodec(std::move(reference)), kernels_(kernels) {}

  std::size_t encode(const EncodeArgs& args, Queue& queue) const override {
    return encode_alike({&args, 1}, cuda_queue(queue));
  }

  void decode(Bytes payload, Values out, Queue& queue) const override {
    const DecodeArgs args{payload, out};
    decode_alike({&args, 1}, cuda_queue(queue));
  }

  void encode_all(std::span<const EncodeArgs> parts, Queue& queue) const override {
    for_alike(
        parts,
        [](const EncodeArgs& args) { return std::tuple(args.in.count, args.in.dtype, args.seed); },
        [&](auto alike) { encode_alike(alike, cuda_queue(queue)); });
  }

  void decode_all(std::span<const DecodeArgs> parts, Queue& queue) const override {
    for_alike(
        parts, [](const DecodeArgs& args) { return std::tuple(args.out.count, args.out.dtype); },
        [&](auto alike) { decode_alike(alike, cuda_queue(queue)); });
  }

  void reduce(const ReduceArgs& args, Values out, Queue& queue) const override {
    const auto& on = cuda_queue(queue);
    const CodecCall call(on.device().index);
    reduce_as(args, out, out.dtype, on);
  }

  std::size_t reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                            Queue& queue) const override {
    const auto* to = dynamic_cast<const CudaCodec*>(&second);
    if (!to)
      throw UnsupportedError("codec '" + second.spec() + "' cannot encode sums on a CUDA device");
    const auto& on = cuda_queue(queue);
    const CodecCall call(on.device().index);
    const auto [_, count, dtype] = target.in;
    const auto* same = dynamic_cast<const CudaTileCodec*>(to);
    if (same && dtype != DType::kFloat64 && same->is_fused(target))
      return same->reduce_encode_fused(*this, args, target, on);
    // Codecs of different kinds, doubles, and what is costly to encode, meet in memory.
    const DType sums = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    const Scratch scratch(count * size_of(sums), on);
    const auto sources = reduce_as(args, {scratch.data(), count, sums}, dtype, on);
    return to->encode_sums({scratch.data(), count, sums}, target, sources, on);
  }

  std::size_t encode_sums(ConstValues values, const EncodeArgs& args, const Sources& sources,
                          const CudaQueue& on) const override {
    return encode_values({&args, 1}, sources, on, values);
  }

  bool encode_corrected(ConstValues values, const EncodeArgs& args, const Sources& sources,
                        const Residual& residual, std::optional<DType> delivered,
                        const CudaQueue& on) const override {
    if (values.dtype == DType::kFloat64) return false;
    const Span span{values.count, args.position,
                    all_aligned(values.data, args.out.data()) && is_aligned(residual)};
    const Correction correction{static_cast<const std::byte*>(values.data), values.dtype,
                                delivered.value_or(DType::kFloat32), residual};
    bool found = false;
    kernels_.with_decoder(args.in.dtype, values.count, [&]<class Decoder>(Decoder decoder) {
      kernels_.with_encoder(args, [&]<class Encoder>(Encoder encoder) {
        if constexpr (kDecodedBy<Encoder, Decoder>) {
          found = true;
          launch(encode_corrected_kernel<Encoder, Decoder>, on, tiles_of(values.count), 1,
                 correction, span, encoder, decoder, seal_of(args), sources, on.workspace());
        }
      });
    });
    return found;
  }

  Values decode_unrounded(Bytes payload, void* memory, ConstValues like,
                          const CudaQueue& on) const override {
    const DType sums = like.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    const Values out{memory, like.count, sums};
    Parts<DecodePart> parts{};
    parts.parts[0] = {static_cast<std::byte*>(memory),
                      {like.count, 0, all_aligned(payload.data(), memory)},
                      payload.data(),
                      sources_of({&payload, 1}, like.count, like.dtype).expected};
    with_float_type(sums, [&]<class T>(T) {
      kernels_.with_decoder(like.dtype, like.count, [&]<class Decoder>(Decoder decoder) {
        if constexpr (std::is_void_v<typename Decoder::Values>)
          launch(decode_kernel<Decoder, T>, on, tiles_of(like.count), 1, parts, decoder,
                 on.workspace(), static_cast<Report*>(nullptr));
      });
    });
    return out;
  }

  BodySize body_size(DType dtype) const override {
    if constexpr (kHasCells)
      return kernels_.body_size(dtype);
    else
      return CudaCodec::body_size(dtype);
  }

  void encode_cells(const CellsToEncode& task, const EncodeArgs& args, const Seal& seal,
                    const Sources& sources, const CudaQueue& on) const override {
    if constexpr (kHasCells)
      kernels_.with_encoder(args, [&]<class Encoder>(Encoder encoder) {
        if constexpr (serves_sums<Encoder, float>)
          launch(encode_cells_kernel<Encoder>, on, task.count, 1, task, encoder, seal, sources,
                 on.workspace());
      });
    else
      CudaCodec::encode_cells(task, args, seal, sources, on);
  }

  void decode_cells(const CellsToDecode& task, DType dtype, const Sources& sources,
                    const CudaQueue& on) const override {
    if constexpr (kHasCells)
      kernels_.with_decoder(dtype, kCellValues, [&]<class Decoder>(Decoder decoder) {
        if constexpr (serves_sums<Decoder, float>)
          launch(decode_cells_kernel<Decoder>, on, task.count, sources.count, task, decoder,
                 sources);
      });
    else
      CudaCodec::decode_cells(task, dtype, sources, on);
  }

 protected:
  // Of the same count, dtype and seed, in one launch. Returns a payload's size.
  virtual std::size_t encode_alike(std::span<const EncodeArgs> args, const CudaQueue& on) const {
    return encode_values(args, Sources{}, on);
  }

  // Of the same count and dtype, in one launch.
  virtual void decode_alike(std::span<const DecodeArgs> args, const CudaQueue& on) const {
    const CodecCall call(on.device().index);
    const auto count = args[0].out.count;
    const auto dtype = args[0].out.dtype;
    const auto parts = decode_parts(args, count);
    with_float_type(dtype, [&]<class T>(T) {
      kernels_.with_decoder(dtype, count, [&]<class Decoder>(Decoder decoder) {
        if constexpr (serves<Decoder, T>)
          launch(decode_kernel<Decoder, T>, on, tiles_of(count), args.size(), parts, decoder,
                 on.workspace(), on.report());
      });
    });
  }

 private:
  static constexpr bool kHasCells =
      requires(const Kernels& kernels) { kernels.body_size(DType::kFloat32); };

  // use(run) for each run of parts that a launch may have together.
  template <class Part, class Key, class Use>
  static void for_alike(std::span<const Part> parts, Key key, Use use) {
    while (!parts.empty()) {
      std::size_t n = 1;
      while (n < parts.size() && n < kMostParts && key(parts[n]) == key(parts[0])) ++n;
      use(parts.first(n));
      parts = parts.subspan(n);
    }
  }

  // `sums`: instead of the values of the one part.
  std::size_t encode_values(std::span<const EncodeArgs> args, const Sources& sources,
                            const CudaQueue& on, std::optional<ConstValues> sums = {}) const {
    const CodecCall call(on.device().index);
    const auto values = sums.value_or(args[0].in);
    auto parts = encode_parts(args, values.count);
    if (sums) {
      parts.parts[0].values = static_cast<const std::byte*>(sums->data);
      parts.parts[0].span.aligned = all_aligned(sums->data, args[0].out.data());
    }
    with_float_type(values.dtype, [&]<class T>(T) {
      kernels_.with_encoder(args[0], [&]<class Encoder>(Encoder encoder) {
        if constexpr (serves_sums<Encoder, T>)
          launch(encode_kernel<Encoder, T>, on, tiles_of(values.count), args.size(), parts, encoder,
                 sources, on.workspace());
      });
    });
    return sizeof(PayloadHeader) + parts.parts[0].seal.header.body_bytes;
  }

  // Sums as `dtype` wants them, rounded to the type of `out`.
  Sources reduce_as(const ReduceArgs& args, Values out, DType dtype, const CudaQueue& on) const {
    const auto sources = sources_of(args.payloads, out.count, dtype);
    Span span{out.count, 0, all_aligned(out.data)};
    for (const Bytes payload : args.payloads) span.aligned &= all_aligned(payload.data());
    with_float_type(out.dtype, [&]<class T>(T) {
      kernels_.with_decoder(dtype, out.count, [&]<class Decoder>(Decoder decoder) {
        if constexpr (serves<Decoder, T> || serves_sums<Decoder, T>)
          launch(reduce_kernel<Decoder, T>, on, tiles_of(out.count), 1,
                 static_cast<std::byte*>(out.data), span, decoder, mean_of(args.divisor, dtype),
                 sources, on.workspace(), on.report());
      });
    });
    return sources;
  }

  bool is_fused(const EncodeArgs& target) const {
    bool fused = false;
    kernels_.with_encoder(target, [&]<class Encoder>(const Encoder&) { fused = kFused<Encoder>; });
    return fused;
  }

  std::size_t reduce_encode_fused(const CudaTileCodec& first, const ReduceArgs& args,
                                  const EncodeArgs& target, const CudaQueue& on) const {
    const auto [_, count, dtype] = target.in;
    const auto sources = first.sources_of(args.payloads, count, dtype);
    const auto seal = seal_of(target);
    Span span{count, target.position, all_aligned(target.out.data())};
    for (const Bytes payload : args.payloads) span.aligned &= all_aligned(payload.data());
    first.kernels_.with_decoder(dtype, count, [&]<class Decoder>(Decoder decoder) {
      kernels_.with_encoder(target, [&]<class Encoder>(Encoder encoder) {
        if constexpr (std::is_same_v<typename Decoder::Values, typename Encoder::Values> &&
                      serves_sums<Encoder, float> && kFused<Encoder>)
          launch(reduce_encode_kernel<Decoder, Encoder>, on, tiles_of(count), 1, span, decoder,
                 encoder, mean_of(args.divisor, dtype), seal, sources, on.workspace(), on.report());
      });
    });
    return sizeof(PayloadHeader) + seal.header.body_bytes;
  }

  Kernels kernels_;
};

}  // namespace cccl::cuda
