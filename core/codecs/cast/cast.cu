// cast_fp16 and cast_bf16 on CUDA devices.
#include <string_view>

#include "devices/cuda/elements.cuh"
#include "devices/cuda/tile_codec.cuh"

namespace cccl {
namespace {

using namespace cuda;

// kOverflow: the bits of the least float that becomes an Inf.
template <class To, std::uint32_t kOverflow>
struct Kernels {
  template <class Use>
  void with_encoder(const EncodeArgs&, Use use) const {
    use(ElementEncoder<To, void, kOverflow>{});
  }
  template <class Use>
  void with_decoder(DType, std::uint64_t, Use use) const {
    use(ElementDecoder<To, void>{});
  }
  static BodySize body_size(DType) { return {.bits = 8 * sizeof(To)}; }
};

using ToHalf = Kernels<Half, std::bit_cast<std::uint32_t>(65520.0f)>;
using ToBFloat = Kernels<BFloat, std::bit_cast<std::uint32_t>(0x1.FFp127f)>;

}  // namespace

std::shared_ptr<const Codec> cast_on_cuda(std::shared_ptr<const Codec> codec) {
  if (std::string_view(codec->info().name) == "cast_fp16")
    return std::make_shared<CudaTileCodec<ToHalf>>(std::move(codec), ToHalf{});
  return std::make_shared<CudaTileCodec<ToBFloat>>(std::move(codec), ToBFloat{});
}

}  // namespace cccl
