// lossless on CUDA devices.
#include <memory>
#include <utility>
#include <vector>

#include "codecs/lossless/decode.cuh"
#include "codecs/lossless/encode.cuh"
#include "devices/cuda/copy.cuh"

namespace cccl {
namespace {

using namespace cuda;
using namespace lossless;

template <class Use>
void with_element(DType dtype, Use use) {
  switch (dtype) {
    case DType::kFloat32: return use(float{});
    case DType::kFloat16: return use(Half{});
    default: return use(BFloat{});
  }
}

class LosslessOnCuda final : public CudaCodec {
 public:
  explicit LosslessOnCuda(std::shared_ptr<const Codec> codec)
      : CudaCodec(std::move(codec)),
        identity_(codec_on(DeviceKind::kCuda, make_codec("identity"))),
        sampled_(spec().ends_with("level=best)") ? 1 : kSampled) {}

  std::size_t encode(const EncodeArgs& args, Queue& queue) const override {
    const auto& on = cuda_queue(queue);
    const CodecCall call(on.device().index);
    return encode_elements(args.in, args, Sources{}, on);
  }

  void decode(Bytes payload, Values out, Queue& queue) const override {
    const auto& on = cuda_queue(queue);
    const CodecCall call(on.device().index);
    decode_elements(payload, out, on);
  }

  void reduce(const ReduceArgs& args, Values out, Queue& queue) const override {
    const Plain plain(*this, args, out.count, out.dtype, queue);
    identity_->reduce({plain.payloads, args.divisor}, out, queue);
  }

  std::size_t reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                            Queue& queue) const override {
    const Plain plain(*this, args, target.in.count, target.in.dtype, queue);
    return identity_->reduce_encode({plain.payloads, args.divisor, args.measures}, second, target,
                                    queue);
  }

  std::size_t encode_sums(ConstValues values, const EncodeArgs& args, const Sources& sources,
                          const CudaQueue& on) const override {
    const CodecCall call(on.device().index);
    const auto [_, count, dtype] = args.in;
    const Scratch scratch(identity_->max_encoded_bytes(count, dtype), on);
    auto rounded = args;
    rounded.checksum = false;
    rounded.out = {static_cast<std::byte*>(scratch.data()),
                   identity_->max_encoded_bytes(count, dtype)};
    dynamic_cast<const CudaCodec&>(*identity_).encode_sums(values, rounded, Sources{}, on);
    return encode_elements({rounded.out.data() + sizeof(PayloadHeader), count, dtype}, args,
                           sources, on);
  }

 private:
  // Payloads as those of identity: their sums are its own.
  struct Plain {
    Plain(const LosslessOnCuda& codec, const ReduceArgs& args, std::size_t count, DType dtype,
          Queue& queue)
        : each(in_units(codec.identity_->max_encoded_bytes(count, dtype))),
          memory((args.payloads.size() + 1) * each, cuda_queue(queue)) {
      auto* at = static_cast<std::byte*>(memory.data());
      EncodeArgs copy;
      copy.in = {at, count, dtype};
      copy.checksum = false;
      for (const Bytes payload : args.payloads) {
        codec.decode(payload, {at, count, dtype}, queue);
        copy.out = {static_cast<std::byte*>(memory.data()) + each * (payloads.size() + 1), each};
        codec.identity_->encode(copy, queue);
        payloads.push_back(copy.out);
      }
    }
    std::size_t each;
    Scratch memory;
    std::vector<Bytes> payloads;
  };

  // Returns the most bytes that the payload may have: its header will say.
  std::size_t encode_elements(ConstValues values, const EncodeArgs& args, const Sources& sources,
                              const CudaQueue& on) const {
    const auto seal = seal_of(args);
    const std::size_t most = sizeof(PayloadHeader) + seal.header.body_bytes;
    if (!codes(values.dtype)) {
      auto given = args;
      given.in = values;
      copy_in(encode_parts({&given, 1}, words_of(values)), 1, values, sources, on);
      return most;
    }
    check_size(values.dtype, values.count);
    const std::uint64_t blocks = blocks_of(values.count);
    const std::size_t bytes = sizeof(Control) + blocks * sizeof(std::uint64_t);
    const Scratch scratch(bytes, on);
    CCCLIB_CUDA(cudaMemsetAsync, scratch.data(), 0, bytes, on.stream());
    auto* const control = static_cast<Control*>(scratch.data());
    const EncodeTask task{static_cast<const std::byte*>(values.data),
                          values.count,
                          blocks,
                          directory_bytes(values.count),
                          sampled_,
                          all_aligned(values.data, args.out.data()),
                          control,
                          reinterpret_cast<unsigned long long*>(control + 1)};
    with_element(values.dtype, [&]<class T>(T) {
      launch(encode_blocks<T>, on, blocks * kWarps, 1, task, seal, sources, on.workspace());
    });
    return most;
  }

  void decode_elements(Bytes payload, Values out, const CudaQueue& on) const {
    const DecodeArgs args{payload, out};
    if (!codes(out.dtype)) return copy_out(decode_parts({&args, 1}, words_of(out)), 1, out, on);
    const auto sources = sources_of({&payload, 1}, out.count, out.dtype);
    const std::uint64_t blocks = blocks_of(out.count);
    const DecodeTask task{static_cast<std::byte*>(out.data), out.count, blocks,
                          directory_bytes(out.count), all_aligned(payload.data(), out.data)};
    with_element(out.dtype, [&]<class T>(T) {
      launch(decode_blocks<T>, on, blocks * kWarps, 1, task, sources, on.workspace(), on.report());
    });
  }

  std::shared_ptr<const Codec> identity_;
  int sampled_;
};

}  // namespace

std::shared_ptr<const Codec> lossless_on_cuda(std::shared_ptr<const Codec> codec) {
  return std::make_shared<LosslessOnCuda>(std::move(codec));
}

}  // namespace cccl
