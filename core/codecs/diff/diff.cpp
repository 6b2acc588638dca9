// diff: what a prediction leaves of values, through another codec. FORMAT.md.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "codecs/diff/diff.h"
#include "devices/cpu/convert.h"
#include "devices/cpu/isa.h"
#include "devices/cpu/tile_codec.h"

namespace cccl {
namespace {

using namespace diff;

static_assert(kCell == kTile);

template <class Real>
struct RealKernels {
  Real (*product)(const Real* a, const Real* b, std::size_t n);
  void (*subtract)(const Real* values, const Real* prediction, Real scale, std::size_t n,
                   Real* out);
  void (*add_back)(const Real* prediction, Real scale, std::size_t n, Real* values);
  Real (*largest)(const Real* values, std::size_t n);
};

struct DiffKernels {
  RealKernels<float> of_float;
  RealKernels<double> of_double;
};

#define CCCLIB_KERNELS "codecs/diff/kernels.inl"
#include "devices/cpu/foreach_isa.inl"

template <class Real>
const RealKernels<Real>& kernels() {
  static const DiffKernels all[] = {baseline::kKernels, avx2::kKernels, avx512::kKernels};
  if constexpr (std::is_same_v<Real, float>)
    return pick(all).of_float;
  else
    return pick(all).of_double;
}

class Diff final : public TileCodec {
 public:
  Diff(const CodecInfo& info, std::shared_ptr<const TileCodec> inner, Prediction prediction = {})
      : TileCodec(info), inner_(std::move(inner)), prediction_(prediction) {}

  std::string spec() const override { return "diff(inner=" + inner_->spec() + ")"; }
  std::size_t granularity() const override { return kCell; }
  bool may_be_inner() const override { return false; }

  std::shared_ptr<const Codec> with_prediction(const Prediction& prediction) const override {
    return std::make_shared<Diff>(info(), inner_, prediction);
  }
  std::shared_ptr<const Codec> inner() const { return inner_; }

  std::size_t body_bytes(std::size_t n, DType dtype) const override {
    return inner_begin(n) + inner_->body_bytes(n, dtype);
  }
  void write_params(std::uint8_t (&params)[4]) const override {
    inner_->write_params(params);
    params[3] = inner_->info().id;
  }
  void error_bound(ConstValues in, std::span<double> bound) const override;

  bool encode_tile(const Tile& tile, const float* values) const override {
    return encode_as(tile, values);
  }
  bool encode_tile(const Tile& tile, const double* values) const override {
    return encode_as(tile, values);
  }
  void decode_tile(const Tile& tile, float* values) const override { decode_as(tile, values); }
  void decode_tile(const Tile& tile, double* values) const override { decode_as(tile, values); }

 private:
  static std::byte* factor_of(const Tile& tile) { return tile.body + kFront + tile.first / kCell; }
  static Tile inner_tile(const Tile& tile) {
    auto inner = tile;
    inner.body += inner_begin(tile.count);
    return inner;
  }

  // The prediction of n values from `position` on, where there is one of all of them.
  template <class Real>
  bool predict(std::uint64_t position, std::size_t n, Real* out) const {
    const auto& known = prediction_.values;
    if (prediction_.number == 0 || position > known.count || n > known.count - position)
      return false;
    load(known.dtype, known.part(position, n).data, n, out);
    return true;
  }

  template <class Real>
  std::int8_t choose(const Real* values, const Real* prediction, std::size_t n, Real* rest) const;
  template <class Real>
  bool encode_as(const Tile& tile, const Real* values) const;
  template <class Real>
  void decode_as(const Tile& tile, Real* values) const;

  std::shared_ptr<const TileCodec> inner_;
  Prediction prediction_;
};

template <class Real>
Real factor(std::int8_t code) {
  return static_cast<Real>(code) / kUnit;
}

// The factor of least squares, and what it leaves; 0 where that is no smaller: of blocks, whose
// largest values make a code's error.
template <class Real>
std::int8_t Diff::choose(const Real* values, const Real* prediction, std::size_t n,
                         Real* rest) const {
  const auto& use = kernels<Real>();
  const Real squares = use.product(prediction, prediction, n);
  const Real wanted = kUnit * (use.product(values, prediction, n) / squares);
  if (!(squares > 0 && std::abs(wanted) <= std::numeric_limits<Real>::max())) return 0;
  const auto code =
      static_cast<std::int8_t>(std::nearbyint(std::clamp<Real>(wanted, -kMostFactor, kMostFactor)));
  if (code == 0) return 0;
  use.subtract(values, prediction, factor<Real>(code), n, rest);
  Real with = 0, without = 0;
  for (std::size_t first = 0; first < n; first += kBlock) {
    const std::size_t m = std::min(kBlock, n - first);
    const Real before = use.largest(values + first, m), after = use.largest(rest + first, m);
    without += before * before;
    with += after * after;
  }
  return with < without ? code : std::int8_t{0};
}

template <class Real>
bool Diff::encode_as(const Tile& tile, const Real* values) const {
  if (tile.first == 0) {
    const Front front{tile.position, prediction_.number};
    std::memcpy(tile.body, &front, sizeof front);
  }
  if (tile.first + tile.n == tile.count)  // others write their factors meanwhile
    std::fill(factor_of(tile) + 1, tile.body + inner_begin(tile.count), std::byte{0});
  alignas(64) Real prediction[kCell], rest[kCell];
  std::int8_t code = 0;
  if (predict(tile.position, tile.n, prediction)) code = choose(values, prediction, tile.n, rest);
  *factor_of(tile) = static_cast<std::byte>(code);
  return inner_->encode_tile(inner_tile(tile), code ? rest : values);
}

template <class Real>
void Diff::decode_as(const Tile& tile, Real* values) const {
  inner_->decode_tile(inner_tile(tile), values);
  const auto code = static_cast<std::int8_t>(*factor_of(tile));
  if (code == 0) return;
  Front front;
  std::memcpy(&front, tile.body, sizeof front);
  alignas(64) Real prediction[kCell];
  if (front.number != prediction_.number ||
      !predict(front.position + tile.first, tile.n, prediction))
    throw error_of(OtherPrediction{front.number, front.position, prediction_.number,
                                   prediction_.values.count});
  kernels<Real>().add_back(prediction, factor<Real>(code), tile.n, values);
}

void Diff::error_bound(ConstValues in, std::span<double> bound) const {
  const auto bound_as = [&]<class Real>(Real) {
    std::vector<Real> values(kCell), prediction(kCell), rest(kCell);
    for (std::size_t first = 0; first < in.count; first += kCell) {
      const auto part = in.part(first, std::min(kCell, in.count - first));
      const auto of_part = bound.subspan(first, part.count);
      load(in.dtype, part.data, part.count, values.data());
      std::int8_t code = 0;
      if (predict(first, part.count, prediction.data()))
        code = choose(values.data(), prediction.data(), part.count, rest.data());
      if (code == 0) {
        inner_->error_bound(part, of_part);
        continue;
      }
      constexpr auto kType = sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;
      inner_->error_bound({rest.data(), part.count, kType}, of_part);
      const double back = in.dtype == DType::kBFloat16  ? 0x1p-8
                          : in.dtype == DType::kFloat16 ? 0x1p-11
                                                        : 0x1p-22;
      for (std::size_t i = 0; i < part.count; ++i)
        of_part[i] += (std::abs(double{values[i]}) + std::abs(2.0 * prediction[i]) + of_part[i]) *
                          (back + 0x1p-22) +
                      (in.dtype == DType::kFloat16 ? 0x1p-25 : 0.0);
    }
  };
  in.dtype == DType::kFloat64 ? bound_as(double{}) : bound_as(float{});
}

std::unique_ptr<Codec> make(const CodecInfo& info, OptionReader& options) {
  constexpr std::string_view kRotations[] = {"none"};
  options.choice("rotation", kRotations);  // its byte of the header names the inner codec
  auto inner = std::dynamic_pointer_cast<const TileCodec>(options.inner("inner", "block_float8"));
  if (!inner || !inner->may_be_inner() || inner->info().lossless)
    options.refuse("inner", "a codec that holds every value, with a loss");
  return std::make_unique<Diff>(info, std::move(inner));
}

std::unique_ptr<Codec> reopen(const CodecInfo& info, const PayloadHeader& header) {
  auto inner = inner_of(header, info);
  if (inner && !inner->info().lossless) return std::make_unique<Diff>(info, std::move(inner));
  throw CorruptPayloadError("diff payload has an unknown inner codec, number " +
                            std::to_string(header.params[3]));
}

const CodecEntry kEntries[] = {{{12, "diff", {}, false, true, true}, make, reopen}};

}  // namespace

std::span<const CodecEntry> diff_codecs() { return kEntries; }

std::shared_ptr<const Codec> diff::inner_of(const Codec& codec) {
  return dynamic_cast<const Diff&>(codec).inner();
}

}  // namespace cccl
