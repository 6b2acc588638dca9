#include "devices/cpu/residual.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "devices/cpu/convert.h"
#include "devices/cpu/isa.h"
#include "devices/cpu/tile_codec.h"

namespace cccl {
namespace {

struct ResidualKernels {
  void (*correct)(const float* values, const float* kept, float decay, std::size_t n, float* out);
  void (*subtract)(const float* values, const float* decoded, std::size_t n, float* out);
};

#define CCCLIB_KERNELS "devices/cpu/residual_kernels.inl"
#include "devices/cpu/foreach_isa.inl"

const ResidualKernels& kernels() {
  static const ResidualKernels all[] = {baseline::kKernels, avx2::kKernels, avx512::kKernels};
  return pick(all);
}

void correct(const float* values, const float* kept, float decay, std::size_t n, float* out) {
  kernels().correct(values, kept, decay, n, out);
}

void correct(const double* values, const float* kept, float decay, std::size_t n, double* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = values[i] + double{decay} * kept[i];
}

void subtract(const float* values, const float* decoded, std::size_t n, float* out) {
  kernels().subtract(values, decoded, n, out);
}

void subtract(const double* values, const double* decoded, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<float>(values[i] - decoded[i]);
}

const TileCodec& block_float8() {
  static const auto codec = make_codec("block_float8");
  return dynamic_cast<const TileCodec&>(*codec);
}

Tile tile_of(const std::byte* body, std::size_t count, std::size_t first, std::size_t n) {
  return {const_cast<std::byte*>(body), DType::kFloat32, count, first, n};
}

class CorrectingWriter final : public PayloadWriter {
 public:
  CorrectingWriter(std::unique_ptr<PayloadWriter> writer, const Residual& residual, DType dtype,
                   bool delivered)
      : writer_(std::move(writer)),
        residual_(residual),
        dtype_(dtype),
        rounds_(delivered && size_of(dtype) < sizeof(float)) {}

  const Pieces& pieces() const override { return writer_->pieces(); }
  void write(std::size_t first, std::size_t n, const float* values) override {
    write_as(first, n, values);
  }
  void write(std::size_t first, std::size_t n, const double* values) override {
    write_as(first, n, values);
  }
  void written(std::size_t first, std::size_t n, float* values) override {
    writer_->written(first, n, values);
  }
  void written(std::size_t first, std::size_t n, double* values) override {
    writer_->written(first, n, values);
  }
  std::size_t finish() override { return writer_->finish(); }

 private:
  template <class Real>
  void write_as(std::size_t first, std::size_t n, const Real* values) {
    const auto& [type, kept, next, count, begin, decay, swapped, spoiled] = residual_;
    alignas(64) Real corrected[kTile], decoded[kTile];
    alignas(64) float tile[kTile];
    const bool in_place = type == ResidualType::kFloat32;
    const std::size_t at = begin + first;
    if (!in_place) load_residual(type, kept, count, at, n, tile);
    const auto* before = in_place ? reinterpret_cast<const float*>(kept) + at : tile;
    correct(values, before, decay, n, corrected);
    writer_->write(first, n, corrected);
    writer_->written(first, n, decoded);
    if constexpr (std::is_same_v<Real, float>) {
      if (rounds_) {
        std::byte stored[kTile * sizeof(float)];
        saturate(dtype_, decoded, n);
        store(dtype_, decoded, n, stored);
        load(dtype_, stored, n, decoded);
      }
    }
    subtract(corrected, decoded, n, in_place ? reinterpret_cast<float*>(next) + at : tile);
    if (!in_place) store_residual(type, tile, count, at, n, next);
  }

  std::unique_ptr<PayloadWriter> writer_;
  Residual residual_;
  DType dtype_;
  bool rounds_;
};

}  // namespace

std::size_t residual_bytes(ResidualType type, std::size_t count) {
  switch (type) {
    case ResidualType::kFloat32: return 4 * count;
    case ResidualType::kBFloat16: return 2 * count;
    case ResidualType::kBlockFloat8: return block_float8().body_bytes(count, DType::kFloat32);
  }
  return 0;
}

void load_residual(ResidualType type, const std::byte* from, std::size_t count, std::size_t first,
                   std::size_t n, float* values) {
  switch (type) {
    case ResidualType::kFloat32: std::memcpy(values, from + 4 * first, 4 * n); return;
    case ResidualType::kBFloat16: return load(DType::kBFloat16, from + 2 * first, n, values);
    case ResidualType::kBlockFloat8:
      return block_float8().decode_tile(tile_of(from, count, first, n), values);
  }
}

void store_residual(ResidualType type, const float* values, std::size_t count, std::size_t first,
                    std::size_t n, std::byte* to) {
  switch (type) {
    case ResidualType::kFloat32: std::memcpy(to + 4 * first, values, 4 * n); return;
    case ResidualType::kBFloat16: return store(DType::kBFloat16, values, n, to + 2 * first);
    case ResidualType::kBlockFloat8:
      block_float8().encode_tile(tile_of(to, count, first, n), values);
      return;
  }
}

std::unique_ptr<PayloadWriter> correcting(std::unique_ptr<PayloadWriter> writer,
                                          const Residual& residual, DType dtype, bool delivered) {
  return std::make_unique<CorrectingWriter>(std::move(writer), residual, dtype, delivered);
}

}  // namespace cccl
