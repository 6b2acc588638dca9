// identity on CUDA devices: a copy of bytes, and sums rounded to their element type.
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
};

// The exponent bits of the elements in a 32-bit word: all set in an Inf or NaN.
struct Exponents {
  std::uint32_t low, high;  // of two elements, or twice of the same
  bool odd_words_only;      // those of float64
  bool floating;
};

Exponents exponents_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return {0x7F800000u, 0x7F800000u, false, true};
    case DType::kFloat16: return {0x7C00u, 0x7C000000u, false, true};
    case DType::kBFloat16: return {0x7F80u, 0x7F800000u, false, true};
    case DType::kFloat64: return {0x7FF00000u, 0x7FF00000u, true, true};
    default: return {};
  }
}

__device__ bool has_non_finite(const Chunk<kChunkBytes>& chunk, const Exponents& exponents) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < chunk.kWords; ++i) {
    const std::uint32_t word = chunk.words[i];
    const bool special =
        (word & exponents.low) == exponents.low || (word & exponents.high) == exponents.high;
    found |= special && (i % 2 || !exponents.odd_words_only);
  }
  return found && exponents.floating;
}

// A tile here has words for values: kRows rows of 16 bytes in each lane.
constexpr int kRows = kPerLane * 4 / kChunkBytes;

using Rows = Chunk<kChunkBytes>[kRows];

// step(tile, offset of its bytes) for each tile of this warp. A full last tile, whose last word is
// cut short, must not be taken for whole.
template <class Step>
__device__ void for_byte_tiles(Span span, std::uint64_t bytes, Step step) {
  span.aligned &= bytes % 4 == 0 || span.count % kTileValues != 0;
  for_tiles(span, [&](const auto& tile) { step(tile, tile.first * 4); });
}

__global__ void __launch_bounds__(kThreads)
    copy_in_kernel(__grid_constant__ const Parts<EncodePart> parts, std::uint64_t bytes,
                   Exponents exponents, Workspace* workspace) {
  const EncodePart& part = parts.mine();
  begin();
  Totals totals{};
  BodyWriter out(part.seal.payload, totals.written);
  for_byte_tiles(part.span, bytes, [&](const auto& tile, std::uint64_t offset) {
    Rows rows;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const std::uint64_t at = offset + k * kLanes * kChunkBytes;
      const auto left = static_cast<std::int64_t>(bytes - at);
      rows[k] = read_row<kChunkBytes>(tile, part.values + at, left);
    }
    bool found = false;
#pragma unroll
    for (const auto& row : rows) found |= has_non_finite(row, exponents);
    if (found) totals.flags |= kFoundNonFinite;
    out.rows(tile, offset, bytes, rows);
  });
  finish(workspace, totals, nullptr, &part.seal);
}

__global__ void __launch_bounds__(kThreads)
    copy_out_kernel(__grid_constant__ const Parts<DecodePart> parts, std::uint64_t bytes,
                    Workspace* workspace, Report* report) {
  const DecodePart& part = parts.mine();
  begin();
  Totals totals = inspect(&part.payload, 1, part.expected, report);
  const BodyReader in(part.payload);
  for_byte_tiles(part.span, bytes, [&](const auto& tile, std::uint64_t offset) {
    Rows rows;
    in.rows(tile, offset, bytes, rows);
    totals.read += checksum_of(offset, lane_id(), rows);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const std::uint64_t at = offset + k * kLanes * kChunkBytes;
      const auto left = static_cast<std::int64_t>(bytes - at);
      write_row(tile, part.values + at, left, rows[k], lane_id());
    }
  });
  finish(workspace, totals, report, nullptr);
}

// Bit patterns of NaN and -0.0 survive, and any dtype passes.
class IdentityOnCuda final : public CudaTileCodec<Kernels> {
 public:
  explicit IdentityOnCuda(std::shared_ptr<const Codec> codec)
      : CudaTileCodec(std::move(codec), Kernels{}) {}

 private:
  std::size_t encode_alike(std::span<const EncodeArgs> args, const CudaQueue& on) const override {
    DeviceGuard guard(on.device().index);
    const std::uint64_t bytes = args[0].in.bytes(), words = (bytes + 3) / 4;
    const auto parts = encode_parts(args, words);
    launch(copy_in_kernel, on, tiles_of(words), args.size(), parts, bytes,
           exponents_of(args[0].in.dtype), on.workspace());
    return sizeof(PayloadHeader) + parts.parts[0].seal.header.body_bytes;
  }

  void decode_alike(std::span<const DecodeArgs> args, const CudaQueue& on) const override {
    DeviceGuard guard(on.device().index);
    const std::uint64_t bytes = args[0].out.bytes(), words = (bytes + 3) / 4;
    launch(copy_out_kernel, on, tiles_of(words), args.size(), decode_parts(args, words), bytes,
           on.workspace(), on.report());
  }
};

}  // namespace

std::shared_ptr<const Codec> identity_on_cuda(std::shared_ptr<const Codec> codec) {
  return std::make_shared<IdentityOnCuda>(std::move(codec));
}

}  // namespace cccl
