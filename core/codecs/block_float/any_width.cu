// block_float of every width, and rotated, on CUDA devices: the bytes of FORMAT.md, as the CPU's.
// One kernel for all widths, since each would be many kernels: 8 and 4 bits without rotation have
// their own in block_float.cu. Sums of one kind that are encoded as another meet in memory.
#include "codecs/block_float/any_decoder.cuh"
#include "codecs/block_float/any_width.cuh"
#include "codecs/block_float/search.cuh"

#include <bit>

#include "devices/cuda/tile_codec.cuh"

namespace cccl::block_float {
namespace {

using namespace on_cuda;

template <bool kRotated>
class Kernels {
 public:
  explicit Kernels(const Settings& settings) : settings_(settings) {}

  template <class Use>
  void with_encoder(const EncodeArgs& args, Use use) const {
    const AnyWidth width(settings_.bits);
    const Rotation rotation{kRotated, args.seed};
    const auto layout = layout_of(args.in.count);
    if (settings_.search && settings_.bits <= kMostSearchedBits)
      use(Search<0, AnyBook>{{width, rotation}, layout});
    else if (settings_.stochastic)
      use(AnyEncoder<Stochastic<AnyWidth>, 0>{{layout}, {width, args.seed, args.runs}, rotation});
    else if (settings_.block == kDefaultBlock && args.in.dtype != DType::kFloat64)
      use(AnyEncoder<Nearest<AnyWidth>, kDefaultBlock>{{layout}, {width}, rotation});
    else
      use(AnyEncoder<Nearest<AnyWidth>, 0>{{layout}, {width}, rotation});
  }

  template <class Use>
  void with_decoder(DType, std::uint64_t count, Use use) const {
    use(AnyDecoder<kRotated>{layout_of(count), settings_.bits, Codebook{settings_.codebook}});
  }

  BodySize body_size(DType) const
    requires(!kRotated)
  {
    return {settings_.bits, 2, 2, std::countr_zero(settings_.block)};
  }

 private:
  Layout layout_of(std::uint64_t count) const {
    return {std::countr_zero(settings_.block), code_bytes(count, settings_.bits)};
  }

  Settings settings_;
};

template <bool kRotated>
std::shared_ptr<const Codec> make(std::shared_ptr<const Codec> codec, const Settings& settings) {
  using OnCuda = cuda::CudaTileCodec<Kernels<kRotated>>;
  return std::make_shared<OnCuda>(std::move(codec), Kernels<kRotated>(settings));
}

}  // namespace

std::shared_ptr<const Codec> any_width_on_cuda(std::shared_ptr<const Codec> codec) {
  const auto& settings = settings_of(*codec);
  return settings.transform ? make<true>(std::move(codec), settings)
                            : make<false>(std::move(codec), settings);
}

}  // namespace cccl::block_float
