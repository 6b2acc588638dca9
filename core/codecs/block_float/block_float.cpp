#include "codecs/block_float/block_float.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "devices/cpu/convert.h"
#include "devices/cpu/isa.h"
#include "devices/cpu/tile_codec.h"

namespace cccl {
namespace {

using namespace block_float;

struct Rounding {
  bool stochastic = false;
  bool search = false;
  std::uint64_t position = 0, seed = 0;
};

// Of one tile: n values in blocks of `block`, the last of which may be shorter.
struct WidthKernels {
  using Decode = void(const std::byte* codes, const std::byte* scales, std::size_t n,
                      std::size_t block, std::uint8_t codebook, float* values);
  // Returns whether a value is Inf or NaN.
  bool (*encode)(const float* values, std::size_t n, std::size_t block, const Rounding&,
                 std::byte* codes, std::byte* scales);
  Decode *decode, *add;
};

struct BlockKernels {
  WidthKernels widths[std::size(kWidths)];
  void (*rotate)(const float* values, std::size_t n, std::size_t block, std::uint64_t seed,
                 float* out);
  using Unrotate = void(float* turned, const std::byte* scales, std::size_t n, std::size_t block,
                        std::uint64_t seed, float* values);
  Unrotate *unrotate, *add_unrotated;
};

#define CCCLIB_KERNELS "codecs/block_float/kernels.inl"
#include "devices/cpu/foreach_isa.inl"

const BlockKernels& kernels() {
  static const BlockKernels all[] = {baseline::kKernels, avx2::kKernels, avx512::kKernels};
  return pick(all);
}

class BlockFloat final : public TileCodec {
 public:
  BlockFloat(const CodecInfo& info, const Settings& settings)
      : TileCodec(info), settings_(settings) {}

  std::string spec() const override {
    return std::string(info().name) + "(block_size=" + std::to_string(settings_.block) +
           ", rounding=" + (settings_.stochastic ? "stochastic" : "nearest") +
           ", level=" + (settings_.search ? "best" : "fast") +
           (settings_.transform ? ", rotation=hadamard" : "") + ")";
  }

  std::size_t granularity() const override { return settings_.block; }
  const Settings& settings() const { return settings_; }

  void error_bound(ConstValues in, std::span<double> bound) const override;

 protected:
  std::size_t body_bytes(std::size_t n, DType) const override {
    return block_float::body_bytes(n, settings_.bits, settings_.block);
  }

  void write_params(std::uint8_t (&params)[4]) const override {
    params[0] = static_cast<std::uint8_t>(settings_.bits);
    params[1] = static_cast<std::uint8_t>(std::countr_zero(settings_.block));
    params[2] = settings_.codebook;
    params[3] = settings_.transform;
  }

  bool keeps_seed() const override { return settings_.transform != kNoTransform; }

  // Codes come first, in order.
  std::size_t settled_bytes(std::size_t n, DType) const override { return n * settings_.bits / 8; }

  bool encode_tile(const Tile& tile, const float* values) const override {
    alignas(64) float rotated[kTile];
    if (settings_.transform) {
      kernels().rotate(values, tile.n, settings_.block, tile.seed, rotated);
      values = rotated;
    }
    const bool non_finite =
        width().encode(values, tile.n, settings_.block,
                       {settings_.stochastic, settings_.search, tile.position, tile.seed},
                       codes_of(tile), scales_of(tile));
    const std::size_t end = tile.first + tile.n;
    if (end == tile.count && end * settings_.bits / 8 < code_bytes(end, settings_.bits))
      zero_padding(tile.body, end);
    return non_finite;
  }

  void decode_tile(const Tile& tile, float* values) const override {
    if (settings_.transform) return decode_rotated(tile, kernels().unrotate, values);
    width().decode(codes_of(tile), scales_of(tile), tile.n, settings_.block, settings_.codebook,
                   values);
  }

  void add_tile(const Tile& tile, float* total) const override {
    if (settings_.transform) return decode_rotated(tile, kernels().add_unrotated, total);
    width().add(codes_of(tile), scales_of(tile), tile.n, settings_.block, settings_.codebook,
                total);
  }
  using TileCodec::add_tile;
  using TileCodec::decode_tile;
  using TileCodec::encode_tile;

 private:
  const WidthKernels& width() const {
    return kernels().widths[std::ranges::find(kWidths, settings_.bits) - kWidths];
  }
  void decode_rotated(const Tile& tile, BlockKernels::Unrotate* unrotate, float* values) const {
    alignas(64) float turned[kTile];
    width().decode(codes_of(tile), scales_of(tile), tile.n, settings_.block, settings_.codebook,
                   turned);
    unrotate(turned, scales_of(tile), tile.n, settings_.block, tile.seed, values);
  }
  std::byte* codes_of(const Tile& tile) const {
    return tile.body + tile.first * settings_.bits / 8;
  }
  std::byte* scales_of(const Tile& tile) const {
    return tile.body + code_bytes(tile.count, settings_.bits) + 2 * (tile.first / settings_.block);
  }

  // Bound of |decoded - x| for the values of a block whose largest magnitude is `extreme`.
  double code_error(double extreme) const;

  // What follows the last code, so that equal values make equal bytes.
  void zero_padding(std::byte* body, std::size_t n) const {
    const std::size_t used = (n * settings_.bits + 7) / 8;
    std::memset(body + used, 0, code_bytes(n, settings_.bits) - used);
  }

  Settings settings_;
};

void BlockFloat::error_bound(ConstValues in, std::span<double> bound) const {
  const double back = in.dtype == DType::kBFloat16  ? 0x1p-8
                      : in.dtype == DType::kFloat16 ? 0x1p-11
                                                    : 0x1p-23;
  const double least = in.dtype == DType::kFloat16 ? 0x1p-25 : 0.0;
  for (std::size_t first = 0; first < in.count; first += settings_.block) {
    const std::size_t n = std::min(settings_.block, in.count - first);
    double extreme = 0, sum = 0;
    for (std::size_t i = first; i < first + n; ++i) {
      const double magnitude = std::abs(value_at(in, i));
      extreme = std::max(extreme, magnitude);
      sum += magnitude;
    }
    // No rotated value is larger than the mean of magnitudes, and all their errors may add up. The
    // sums themselves are rounded up to ten times each way.
    const bool rotated = settings_.transform && n == settings_.block;
    const double coded =
        rotated ? n * (code_error(sum / n) + 0x1p-134) + sum * 0x1p-18 : code_error(extreme);
    for (std::size_t i = first; i < first + n; ++i)
      bound[i] = extreme > std::numeric_limits<float>::max()
                     ? std::numeric_limits<double>::infinity()
                     : coded + (std::abs(value_at(in, i)) + coded) * back + least;
  }
}

double BlockFloat::code_error(double extreme) const {
  const int bits = settings_.bits;
  const double steps = std::ldexp(1.0, bits);
  const bool codebook = settings_.codebook == kNormal4;
  const bool clipped = settings_.search && bits < 4;
  // Half a step, or a whole one where rounding is random; with the codebook half the widest gap of
  // 30, and half a unit as cuts are whole numbers, at the larger scale; with a clipped linear scale
  // what the highest code falls short of. The scale is rounded up by less than 2^-7, fp32 adds
  // 2^-14.
  const double share = codebook               ? 15.5 * kReachOpposite
                       : clipped              ? 1 - linear_clip(bits) * (steps - 2) / (steps - 1)
                       : settings_.stochastic ? 2 / (steps - 2)
                                              : 1 / (steps - 1);
  // Scales have a smallest value, and a largest that keeps the extreme's code finite.
  const double smallest = codebook ? 0x1p-129 : settings_.stochastic ? 0x1p-133 : 0x1p-134;
  const double coded = extreme * share * (1 + 0x1p-7 + 0x1p-14) + smallest;
  if (extreme <= 0x1.8p127) return coded;
  return std::max(coded, codebook ? 0.168 * 0x1p128 : std::ldexp(2 - 0x1p-7, 128 - bits) + 0x1p120);
}

template <int kBits>
std::unique_ptr<Codec> make(const CodecInfo& info, OptionReader& options) {
  constexpr std::string_view kRoundings[] = {"nearest", "stochastic"};
  constexpr std::string_view kLevels[] = {"fast", "best"};
  constexpr std::string_view kRotations[] = {"none", "hadamard"};
  Settings settings;
  settings.bits = kBits;
  const auto block = options.integer("block_size", kDefaultBlock);
  settings.stochastic = options.choice("rounding", kRoundings) == "stochastic";
  settings.search = options.choice("level", kLevels) == "best";
  if (options.choice("rotation", kRotations) == "hadamard") settings.transform = kHadamard;
  if (block < static_cast<std::int64_t>(kMinBlock) ||
      block > static_cast<std::int64_t>(kMaxBlock) ||
      !std::has_single_bit(static_cast<std::uint64_t>(block)))
    options.refuse("block_size", "a power of two from 32 to 1024");
  if (settings.search && settings.stochastic)
    options.refuse("rounding", "nearest with level 'best', which searches for the least error");
  settings.block = static_cast<std::size_t>(block);
  if (settings.search && kBits == 4) settings.codebook = kNormal4;
  return std::make_unique<BlockFloat>(info, settings);
}

// Rounding and level are the encoder's affair: they leave no trace but the codebook.
template <int kBits>
std::unique_ptr<Codec> reopen(const CodecInfo& info, const PayloadHeader& header) {
  const auto [bits, log2_block, codebook, transform] = header.params;
  Settings settings;
  settings.bits = kBits;
  settings.codebook = codebook;
  settings.search = codebook != kLinear;
  settings.transform = transform;
  if (bits != kBits || log2_block < 5 || log2_block > 10 || transform > kHadamard ||
      codebook > (kBits == 4 ? kNormal4 : kLinear))
    throw CorruptPayloadError("block_float payload has unknown parameters: bits " +
                              std::to_string(bits) + ", block 2^" + std::to_string(log2_block) +
                              ", codebook " + std::to_string(codebook) + ", transform " +
                              std::to_string(transform));
  settings.block = std::size_t{1} << log2_block;
  return std::make_unique<BlockFloat>(info, settings);
}

const CodecEntry kEntries[] = {
    {{4, "block_float8", {"block_fp16_to_8bit"}, false, true}, make<8>, reopen<8>},
    {{5, "block_float4", {"block_fp16_to_4bit"}, false, true}, make<4>, reopen<4>},
    {{6, "block_float6", {}, false, true}, make<6>, reopen<6>},
    {{7, "block_float5", {}, false, true}, make<5>, reopen<5>},
    {{8, "block_float3", {}, false, true}, make<3>, reopen<3>},
    {{9, "block_float2", {}, false, true}, make<2>, reopen<2>},
};

}  // namespace

const Settings& block_float::settings_of(const Codec& codec) {
  return dynamic_cast<const BlockFloat&>(codec).settings();
}

std::span<const CodecEntry> block_float_codecs() { return kEntries; }

}  // namespace cccl
