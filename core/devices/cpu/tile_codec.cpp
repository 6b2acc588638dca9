#include "devices/cpu/tile_codec.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "devices/cpu/convert.h"
#include "devices/cpu/float_environment.h"

namespace cccl {
namespace {

// A float tile and its codes stay in the first-level cache. A multiple of every block size.
constexpr std::size_t kTile = 1024;
static_assert(kTile * sizeof(double) <= 8192);

bool is_wide(DType dtype) { return dtype == DType::kFloat64; }

std::byte* body_of(Bytes payload) {
  return const_cast<std::byte*>(payload.data()) + sizeof(PayloadHeader);
}

}  // namespace

bool TileCodec::encode_tile(const Tile& tile, const double* values) const {
  float narrow[kTile];
  for (std::size_t i = 0; i < tile.n; ++i) narrow[i] = static_cast<float>(values[i]);
  return encode_tile(tile, narrow);
}

void TileCodec::decode_tile(const Tile& tile, double* values) const {
  float narrow[kTile];
  decode_tile(tile, narrow);
  std::copy_n(narrow, tile.n, values);
}

PayloadHeader TileCodec::header_for(const EncodeArgs& args) const {
  if (!supports(args.in.dtype))
    throw UnsupportedError(std::string("codec '") + info_.name + "' does not take dtype " +
                           name_of(args.in.dtype) + "; integers and bools are never lossy");
  const auto need = max_encoded_bytes(args.in.count, args.in.dtype);
  if (args.out.size() < need)
    throw Error("encode needs room for " + std::to_string(need) + " bytes, got " +
                std::to_string(args.out.size()));
  PayloadHeader header;
  header.codec = info_.id;
  header.dtype = static_cast<std::uint8_t>(args.in.dtype);
  header.count = args.in.count;
  header.body_bytes = need - sizeof header;
  header.origin = args.origin;
  if (args.origin) header.flags |= kHasNonFinite;
  write_params(header.params);
  return header;
}

PayloadHeader TileCodec::open(Bytes payload, std::size_t count, DType dtype) const {
  const auto header = open_payload(payload);
  std::uint8_t params[4] = {};
  write_params(params);
  std::string wrong;
  if (header.codec != info_.id || std::memcmp(header.params, params, sizeof params) != 0)
    wrong = "it was made by another codec or with other options than " + spec();
  else if (header.dtype != static_cast<std::uint8_t>(dtype))
    wrong =
        std::string("it holds ") + name_of(DType{header.dtype}) + ", expected " + name_of(dtype);
  else if (!supports(dtype))
    wrong = std::string("it holds ") + name_of(dtype) + ", which this codec never encodes";
  else if (header.count != count)
    wrong =
        "it holds " + std::to_string(header.count) + " values, expected " + std::to_string(count);
  else if (header.body_bytes != body_bytes(count, dtype))
    wrong = "its body has " + std::to_string(header.body_bytes) + " bytes, expected " +
            std::to_string(body_bytes(count, dtype));
  if (!wrong.empty()) throw CorruptPayloadError("unexpected payload: " + wrong);
  return header;
}

template <class Real>
std::size_t TileCodec::encode_as(const EncodeArgs& args) const {
  auto header = header_for(args);
  const auto in = args.in;
  Real tile[kTile];
  for (std::size_t first = 0; first < in.count; first += kTile) {
    const std::size_t n = std::min(kTile, in.count - first);
    load(in.dtype, in.part(first, n).data, n, tile);
    const Tile place{args.out.data() + sizeof header, in.dtype, in.count, first, n,
                     args.position + first,           args.seed};
    if (encode_tile(place, tile)) header.flags |= kHasNonFinite;
  }
  seal_payload(args.out, header, args.checksum);
  return sizeof header + header.body_bytes;
}

std::size_t TileCodec::encode(const EncodeArgs& args, Queue&) const {
  FloatEnvironment environment;
  return is_wide(args.in.dtype) ? encode_as<double>(args) : encode_as<float>(args);
}

template <class Real>
void TileCodec::decode_as(Bytes payload, Values out) const {
  Real tile[kTile];
  for (std::size_t first = 0; first < out.count; first += kTile) {
    const std::size_t n = std::min(kTile, out.count - first);
    decode_tile({body_of(payload), out.dtype, out.count, first, n}, tile);
    if constexpr (std::is_same_v<Real, float>) saturate(out.dtype, tile, n);
    store(out.dtype, tile, n, out.part(first, n).data);
  }
}

void TileCodec::decode(Bytes payload, Values out, Queue&) const {
  FloatEnvironment environment;
  open(payload, out.count, out.dtype);
  is_wide(out.dtype) ? decode_as<double>(payload, out) : decode_as<float>(payload, out);
}

// consume(first, n, tile) gets the finished mean of one tile after the other.
template <class Real, class Consume>
void TileCodec::reduce_as(const ReduceArgs& args, std::size_t count, DType dtype,
                          Consume consume) const {
  Real total[kTile], term[kTile];
  for (std::size_t first = 0; first < count; first += kTile) {
    const std::size_t n = std::min(kTile, count - first);
    Real* target = total;
    for (const auto payload : args.payloads) {
      decode_tile({body_of(payload), dtype, count, first, n}, target);
      if (target == term) add(term, n, total);
      target = term;
    }
    finish_sum(dtype, args.divisor, total, n);
    consume(first, n, total);
  }
}

void TileCodec::reduce(const ReduceArgs& args, Values out, Queue&) const {
  FloatEnvironment environment;
  for (const auto payload : args.payloads) open(payload, out.count, out.dtype);
  const auto write = [&](std::size_t first, std::size_t n, const auto* tile) {
    store(out.dtype, tile, n, out.part(first, n).data);
  };
  is_wide(out.dtype) ? reduce_as<double>(args, out.count, out.dtype, write)
                     : reduce_as<float>(args, out.count, out.dtype, write);
}

std::size_t TileCodec::reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                                     Queue&) const {
  FloatEnvironment environment;
  const auto* to = dynamic_cast<const TileCodec*>(&second);
  if (!to) throw UnsupportedError("codec '" + second.spec() + "' cannot encode sums on a CPU");
  const std::size_t count = target.in.count;
  const DType dtype = target.in.dtype;
  for (std::size_t rank = 0; rank < args.payloads.size(); ++rank) {
    const auto header = open(args.payloads[rank], count, dtype);
    if (!target.origin && (header.flags & kHasNonFinite))
      target.origin = static_cast<std::uint32_t>(rank + 1);
  }
  auto header = to->header_for(target);
  const auto encode = [&](std::size_t first, std::size_t n, const auto* tile) {
    const Tile place{target.out.data() + sizeof header, dtype,      count, first, n,
                     target.position + first,           target.seed};
    if (to->encode_tile(place, tile)) header.flags |= kHasNonFinite;
  };
  is_wide(dtype) ? reduce_as<double>(args, count, dtype, encode)
                 : reduce_as<float>(args, count, dtype, encode);
  seal_payload(target.out, header, target.checksum);
  return sizeof header + header.body_bytes;
}

}  // namespace cccl
