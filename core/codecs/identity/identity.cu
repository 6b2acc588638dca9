// identity on CUDA devices: a copy of bytes, and sums rounded to their element type.
#include "devices/cuda/copy.cuh"
#include "devices/cuda/elements.cuh"
#include "devices/cuda/tile_codec.cuh"

namespace cccl {
namespace {

using namespace cuda;

struct Kernels {
  template <class Use>
  void with_encoder(const EncodeArgs& args, Use use) const {
    with_float_type(args.in.dtype, [&](auto type) {
      use(ElementEncoder<decltype(type), decltype(type), 0x7F800000u>{});
    });
  }
  template <class Use>
  void with_decoder(DType dtype, std::uint64_t, Use use) const {
    with_float_type(dtype,
                    [&](auto type) { use(ElementDecoder<decltype(type), decltype(type)>{}); });
  }
  static BodySize body_size(DType dtype) { return {.bits = 8 * static_cast<int>(size_of(dtype))}; }
};

// Bit patterns of NaN and -0.0 survive, and any dtype passes.
class IdentityOnCuda final : public CudaTileCodec<Kernels> {
 public:
  explicit IdentityOnCuda(std::shared_ptr<const Codec> codec)
      : CudaTileCodec(std::move(codec), Kernels{}) {}

 private:
  std::size_t encode_alike(std::span<const EncodeArgs> args, const CudaQueue& on) const override {
    const CodecCall call(on.device().index);
    const auto parts = encode_parts(args, words_of(args[0].in));
    copy_in(parts, args.size(), args[0].in, Sources{}, on);
    return sizeof(PayloadHeader) + parts.parts[0].seal.header.body_bytes;
  }

  void decode_alike(std::span<const DecodeArgs> args, const CudaQueue& on) const override {
    const CodecCall call(on.device().index);
    copy_out(decode_parts(args, words_of(args[0].out)), args.size(), args[0].out, on);
  }
};

}  // namespace

std::shared_ptr<const Codec> identity_on_cuda(std::shared_ptr<const Codec> codec) {
  return std::make_shared<IdentityOnCuda>(std::move(codec));
}

}  // namespace cccl
