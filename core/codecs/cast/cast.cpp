// cast_fp16, cast_bf16: values rounded to 16 bits (float64 by way of float32), summed in fp32.
// FORMAT.md has the bounds.
#include <bit>
#include <cmath>
#include <limits>

#include "devices/cpu/convert.h"
#include "devices/cpu/tile_codec.h"

namespace cccl {
namespace {

class Cast final : public TileCodec {
 public:
  Cast(const CodecInfo& info, DType to) : TileCodec(info), to_(to) {}

  std::string spec() const override { return info().name; }
  std::size_t granularity() const override { return 64; }

  void error_bound(ConstValues in, std::span<double> bound) const override {
    const bool half = to_ == DType::kFloat16;
    const double relative = half ? 0x1p-11 : 0x1p-8;
    const double smallest = half ? 0x1p-25 : 0x1p-134;
    const double largest = half ? 65504.0 : 0x1.FEp127;
    for (std::size_t i = 0; i < in.count; ++i) {
      const double magnitude = std::abs(value_at(in, i));
      bound[i] = magnitude > largest ? std::numeric_limits<double>::infinity()
                                     : std::max(magnitude * relative * (1 + 0x1p-10), smallest);
    }
  }

 protected:
  std::size_t body_bytes(std::size_t n, DType) const override { return 2 * n; }
  std::size_t settled_bytes(std::size_t n, DType) const override { return 2 * n; }
  bool encode_tile(const Tile& tile, const float* values) const override {
    store(to_, values, tile.n, tile.body + 2 * tile.first);
    const float overflows = to_ == DType::kFloat16 ? 65520.0f : 0x1.FFp127f;
    return largest_magnitude(values, tile.n) >= std::bit_cast<std::uint32_t>(overflows);
  }
  void decode_tile(const Tile& tile, float* values) const override {
    load(to_, tile.body + 2 * tile.first, tile.n, values);
  }
  using TileCodec::decode_tile;
  using TileCodec::encode_tile;

 private:
  DType to_;
};

template <DType kTo, class... Ignored>
std::unique_ptr<Codec> make(const CodecInfo& info, Ignored&...) {
  return std::make_unique<Cast>(info, kTo);
}

const CodecEntry kEntries[] = {
    {{2, "cast_fp16", {"fp16", "float16"}, false, true},
     make<DType::kFloat16>,
     make<DType::kFloat16>},
    {{3, "cast_bf16", {"bf16", "bfloat16"}, false, true},
     make<DType::kBFloat16>,
     make<DType::kBFloat16>},
};

}  // namespace

std::span<const CodecEntry> cast_codecs() { return kEntries; }

}  // namespace cccl
