// identity: the values' own bytes. Rounding happens only where sums return to their dtype.
#include <algorithm>
#include <cstring>

#include "api/measure.h"
#include "devices/cpu/convert.h"
#include "devices/cpu/tile_codec.h"

namespace cccl {
namespace {

class Identity final : public TileCodec {
 public:
  using TileCodec::TileCodec;

  std::string spec() const override { return "identity"; }
  std::size_t granularity() const override { return 64; }
  bool supports(DType) const override { return true; }

  void error_bound(ConstValues, std::span<double> bound) const override {
    std::ranges::fill(bound, 0.0);
  }

  // A plain copy: bit patterns of NaN and -0.0 survive, and any dtype passes.
  std::size_t encode(const EncodeArgs& args, Queue&) const override {
    auto header = header_for(args);
    if (args.in.count)
      std::memcpy(args.out.data() + sizeof header, args.in.data, header.body_bytes);
    if (has_non_finite(args.in)) header.flags |= kHasNonFinite;
    seal_payload(args.out, header, args.checksum);
    return sizeof header + header.body_bytes;
  }

  void decode(Bytes payload, Values out, Queue&) const override {
    open(payload, out.count, out.dtype);
    if (out.count) std::memcpy(out.data, payload.data() + sizeof(PayloadHeader), out.bytes());
  }

 protected:
  std::size_t body_bytes(std::size_t n, DType dtype) const override { return n * size_of(dtype); }
  std::size_t settled_bytes(std::size_t n, DType dtype) const override {
    return body_bytes(n, dtype);
  }
  bool encode_tile(const Tile& tile, const float* values) const override {
    store(tile.dtype, values, tile.n, at(tile));
    return has_non_finite(values, tile.n);
  }
  bool encode_tile(const Tile& tile, const double* values) const override {
    store(tile.dtype, values, tile.n, at(tile));
    return has_non_finite(values, tile.n);
  }
  void decode_tile(const Tile& tile, float* values) const override {
    load(tile.dtype, at(tile), tile.n, values);
  }
  void decode_tile(const Tile& tile, double* values) const override {
    load(tile.dtype, at(tile), tile.n, values);
  }

 private:
  static std::byte* at(const Tile& tile) { return tile.body + tile.first * size_of(tile.dtype); }
};

template <class... Ignored>
std::unique_ptr<Codec> make(const CodecInfo& info, Ignored&...) {
  return std::make_unique<Identity>(info);
}

const CodecEntry kEntries[] = {{{1, "identity", {}, true, true}, make, make}};

}  // namespace

std::span<const CodecEntry> identity_codecs() { return kEntries; }

}  // namespace cccl
