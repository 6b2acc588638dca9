// block_float8 and block_float4 without rotation on CUDA devices: the bytes of FORMAT.md, as the
// CPU's. The others: any_width.cu.
#include "codecs/block_float/block_float.cuh"
#include "codecs/block_float/decoder.cuh"
#include "codecs/block_float/search.cuh"

#include <bit>

#include "devices/cuda/tile_codec.cuh"

namespace cccl {
namespace {

using namespace block_float;
using namespace block_float::on_cuda;

class Kernels {
 public:
  explicit Kernels(const Settings& settings) : settings_(settings) {}

  template <class Use>
  void with_encoder(const EncodeArgs& args, Use use) const {
    const Layout layout{log2_block(), code_bytes(args.in.count, settings_.bits)};
    const bool is_usual = settings_.block == kDefaultBlock && args.in.dtype != DType::kFloat64;
    const auto with_block = [&]<class Quantiser>(Quantiser quantiser) {
      if (is_usual)
        use(Encoder<Quantiser, kDefaultBlock>{{layout}, quantiser});
      else
        use(Encoder<Quantiser, 0>{{layout}, quantiser});
    };
    if (settings_.bits == 8)
      settings_.stochastic ? with_block(Stochastic<FixedWidth<8>>{{}, args.seed, args.runs})
                           : with_block(Nearest<FixedWidth<8>>{});
    else if (settings_.search)
      is_usual ? use(Search<kDefaultBlock, Normal4Book>{{}, layout})
               : use(Search<0, Normal4Book>{{}, layout});
    else
      settings_.stochastic ? with_block(Stochastic<FixedWidth<4>>{{}, args.seed, args.runs})
                           : with_block(Nearest<FixedWidth<4>>{});
  }

  template <class Use>
  void with_decoder(DType, std::uint64_t count, Use use) const {
    const Layout layout{log2_block(), code_bytes(count, settings_.bits)};
    if (settings_.bits == 8)
      use(Decoder<8, kLinear>{layout});
    else if (settings_.codebook == kNormal4)
      use(Decoder<4, kNormal4>{layout});
    else
      use(Decoder<4, kLinear>{layout});
  }

  BodySize body_size(DType) const { return {settings_.bits, 2, 2, log2_block()}; }

 private:
  int log2_block() const { return std::countr_zero(settings_.block); }

  Settings settings_;
};

}  // namespace

std::shared_ptr<const Codec> block_float_on_cuda(std::shared_ptr<const Codec> codec) {
  const auto& settings = block_float::settings_of(*codec);
  if (settings.transform || (settings.bits != 8 && settings.bits != 4))
    return any_width_on_cuda(std::move(codec));
  const Kernels kernels(settings);
  return std::make_shared<cuda::CudaTileCodec<Kernels>>(std::move(codec), kernels);
}

}  // namespace cccl
