// A codec of tiles on CUDA devices. All that is not the codec's own is here once.
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

#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "devices/cuda/codec.cuh"

namespace cccl::cuda {

template <class Coder>
inline constexpr bool kForDoubles = true;
template <class Coder>
  requires requires { Coder::kDoubles; }
inline constexpr bool kForDoubles<Coder> = Coder::kDoubles;

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
    (std::is_void_v<typename Coder::Values> &&
     (!std::is_same_v<T, double> || kForDoubles<Coder>)) ||
    std::is_same_v<typename SumsOf<typename Coder::Values>::Type, T>;

// Whether one kernel encodes with this encoder, and decodes again with that decoder.
template <class Encoder, class Decoder>
inline constexpr bool kDecodedBy = false;
template <class Encoder, class Decoder>
  requires requires { typename Encoder::DecodedBy; }
inline constexpr bool kDecodedBy<Encoder, Decoder> =
    std::is_same_v<typename Encoder::DecodedBy, Decoder>;

template <class Kernels>
class CudaTileCodec : public SummingCodec {
 public:
  CudaTileCodec(std::shared_ptr<const Codec> reference, const Kernels& kernels)
      : SummingCodec(std::move(reference)), kernels_(kernels) {}

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
    const DType sums = sums_of(like.dtype);
    decode_all_unrounded({&payload, 1}, static_cast<std::byte*>(memory), 0, like, on);
    return {memory, like.count, sums};
  }

  void decode_all_unrounded(std::span<const Bytes> payloads, std::byte* memory, std::size_t stride,
                            ConstValues like, const CudaQueue& on) const override {
    for (std::size_t i = 0; i < payloads.size(); i += kMostParts) {
      const auto some = payloads.subspan(i, std::min<std::size_t>(kMostParts, payloads.size() - i));
      decode_floats(some, memory + i * stride, stride, like, on);
    }
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
  // By one launch; nobody is told of damage.
  void decode_floats(std::span<const Bytes> payloads, std::byte* memory, std::size_t stride,
                     ConstValues like, const CudaQueue& on) const {
    Parts<DecodePart> parts{};
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      const auto payload = payloads[i];
      auto* const to = memory + i * stride;
      parts.parts[i] = {to,
                        {like.count, 0, all_aligned(payload.data(), to)},
                        payload.data(),
                        sources_of({&payload, 1}, like.count, like.dtype).expected,
                        !is_peer_memory(payload.data())};
    }
    with_float_type(sums_of(like.dtype), [&]<class T>(T) {
      kernels_.with_decoder(like.dtype, like.count, [&]<class Decoder>(Decoder decoder) {
        if constexpr (std::is_void_v<typename Decoder::Values>)
          launch(decode_kernel<Decoder, T>, on, tiles_of(like.count), payloads.size(), parts,
                 decoder, on.workspace(), static_cast<Report*>(nullptr));
      });
    });
  }

  static constexpr bool kHasCells =
      requires(const Kernels& kernels) { kernels.body_size(DType::kFloat32); };

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

  std::optional<std::size_t> reduce_encode_at_once(const ReduceArgs& args, const CudaCodec& second,
                                                   const EncodeArgs& target,
                                                   const CudaQueue& on) const override {
    const auto* same = dynamic_cast<const CudaTileCodec*>(&second);
    if (!same || target.in.dtype == DType::kFloat64 || !same->is_fused(target)) return std::nullopt;
    return same->reduce_encode_fused(*this, args, target, on);
  }

  Sources reduce_as(const ReduceArgs& args, Values out, DType dtype,
                    const CudaQueue& on) const override {
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
    kernels_.with_encoder(target,
                          [&]<class Encoder>(const Encoder&) { fused = !kIsCostly<Encoder>; });
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
                      serves_sums<Encoder, float> && !kIsCostly<Encoder>)
          launch(reduce_encode_kernel<Decoder, Encoder>, on, tiles_of(count), 1, span, decoder,
                 encoder, mean_of(args.divisor, dtype), seal, sources, on.workspace(), on.report());
      });
    });
    return sizeof(PayloadHeader) + seal.header.body_bytes;
  }

  Kernels kernels_;
};

}  // namespace cccl::cuda
