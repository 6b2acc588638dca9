#include "devices/cpu/tile_codec.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "devices/cpu/convert.h"
#include "devices/cpu/float_environment.h"

namespace cccl {
namespace {

bool is_wide(DType dtype) { return dtype == DType::kFloat64; }

std::byte* body_of(Bytes payload) {
  return const_cast<std::byte*>(payload.data()) + sizeof(PayloadHeader);
}

// `memory` where it can be used as it is: values of that very type, aligned. Else null.
template <class Real, class Memory>
Real* in_place(DType dtype, Memory* memory) {
  const bool same = dtype == (sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32);
  const bool aligned = reinterpret_cast<std::uintptr_t>(memory) % alignof(Real) == 0;
  return same && aligned ? static_cast<Real*>(memory) : nullptr;
}

// Adds up a body's checksum tile by tile, while it is written or read and in the cache.
class RunningChecksum {
 public:
  RunningChecksum(Bytes body, bool wanted) : body_(body), wanted_(wanted) {}

  void take(std::size_t settled) {
    settled = settled / 4 * 4;
    if (!wanted_ || settled <= done_) return;
    sum_ += checksum(body_.subspan(done_, settled - done_), done_ / 4);
    done_ = settled;
  }
  void write(PayloadHeader& header) const {
    if (!wanted_) return;
    header.flags |= kHasChecksum;
    header.checksum = whole();
  }
  void compare(const PayloadHeader& header) const {
    if (wanted_) check_body(header, whole());
  }

 private:
  std::uint64_t whole() const { return sum_ + checksum(body_.subspan(done_), done_ / 4); }

  Bytes body_;
  bool wanted_;
  std::size_t done_ = 0;
  std::uint64_t sum_ = 0;
};

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

void TileCodec::add_tile(const Tile& tile, float* total) const {
  float term[kTile];
  decode_tile(tile, term);
  add(term, tile.n, total);
}

void TileCodec::add_tile(const Tile& tile, double* total) const {
  double term[kTile];
  decode_tile(tile, term);
  add(term, tile.n, total);
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
  if (keeps_seed()) header.seed = args.seed;
  return header;
}

PayloadHeader TileCodec::open(Bytes payload, std::size_t count, DType dtype,
                              bool with_checksum) const {
  const auto header = open_payload(payload, with_checksum);
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
  const auto body = args.out.subspan(sizeof header, header.body_bytes);
  const auto* values = in_place<const Real>(in.dtype, in.data);
  RunningChecksum sum(body, args.checksum);
  Real tile[kTile];
  for (std::size_t first = 0; first < in.count; first += kTile) {
    const std::size_t n = std::min(kTile, in.count - first);
    if (!values) load(in.dtype, in.part(first, n).data, n, tile);
    const Tile place{body.data(), in.dtype, in.count, first, n, args.position + first, args.seed};
    if (encode_tile(place, values ? values + first : tile)) header.flags |= kHasNonFinite;
    sum.take(settled_bytes(first + n, in.dtype));
  }
  sum.write(header);
  write_header(args.out, header);
  return sizeof header + header.body_bytes;
}

std::size_t TileCodec::encode(const EncodeArgs& args, Queue&) const {
  FloatEnvironment environment;
  return is_wide(args.in.dtype) ? encode_as<double>(args) : encode_as<float>(args);
}

template <class Real>
void TileCodec::decode_as(Bytes payload, std::uint64_t seed, Values out) const {
  auto* values = in_place<Real>(out.dtype, out.data);
  Real tile[kTile];
  for (std::size_t first = 0; first < out.count; first += kTile) {
    const std::size_t n = std::min(kTile, out.count - first);
    const Tile place{body_of(payload), out.dtype, out.count, first, n, 0, seed};
    decode_tile(place, values ? values + first : tile);
    if (values) continue;
    if constexpr (std::is_same_v<Real, float>) saturate(out.dtype, tile, n);
    store(out.dtype, tile, n, out.part(first, n).data);
  }
}

void TileCodec::decode(Bytes payload, Values out, Queue&) const {
  FloatEnvironment environment;
  const auto seed = open(payload, out.count, out.dtype).seed;
  is_wide(out.dtype) ? decode_as<double>(payload, seed, out) : decode_as<float>(payload, seed, out);
}

// consume(first, n, total) gets the finished mean of one tile after the other. Sums are made in
// `values` where that is not null. About to decode a tile, it calls arrive(payload's index, values
// decoded after it).
template <class Real, class Arrive, class Consume>
void TileCodec::reduce_as(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                          std::size_t count, DType dtype, Real* values, Arrive arrive,
                          Consume consume) const {
  Real tile[kTile];
  for (std::size_t first = 0; first < count; first += kTile) {
    const std::size_t n = std::min(kTile, count - first);
    Real* const total = values ? values + first : tile;
    for (std::size_t i = 0; i < args.payloads.size(); ++i) {
      const Tile place{body_of(args.payloads[i]), dtype, count, first, n, 0, headers[i].seed};
      arrive(i, first + n);
      i == 0 ? decode_tile(place, total) : add_tile(place, total);
    }
    finish_sum(dtype, args.divisor, total, n);
    consume(first, n, total);
  }
}

template <class Real>
void TileCodec::reduce_into(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                            Values out) const {
  auto* values = in_place<Real>(out.dtype, out.data);
  reduce_as<Real>(
      args, headers, out.count, out.dtype, values, [](std::size_t, std::size_t) {},
      [&](std::size_t first, std::size_t n, const Real* total) {
        if (!values) store(out.dtype, total, n, out.part(first, n).data);
      });
}

void TileCodec::reduce(const ReduceArgs& args, Values out, Queue&) const {
  FloatEnvironment environment;
  std::vector<PayloadHeader> headers;
  for (const auto payload : args.payloads) headers.push_back(open(payload, out.count, out.dtype));
  is_wide(out.dtype) ? reduce_into<double>(args, headers, out)
                     : reduce_into<float>(args, headers, out);
}

// Checks the payloads' bodies as it reads them: the target counts only once its header is written.
template <class Real>
void TileCodec::reduce_encode_as(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                                 const TileCodec& second, const EncodeArgs& target,
                                 PayloadHeader header) const {
  const auto body = target.out.subspan(sizeof header, header.body_bytes);
  const auto [_, count, dtype] = target.in;
  std::vector<RunningChecksum> arrived;
  for (std::size_t i = 0; i < headers.size(); ++i)
    arrived.emplace_back(args.payloads[i].subspan(sizeof header, headers[i].body_bytes),
                         headers[i].flags & kHasChecksum);
  RunningChecksum sum(body, target.checksum);
  reduce_as<Real>(
      args, headers, count, dtype, nullptr,
      [&](std::size_t i, std::size_t n) { arrived[i].take(settled_bytes(n, dtype)); },
      [&](std::size_t first, std::size_t n, const Real* total) {
        const Tile place{body.data(), dtype, count, first, n, target.position + first, target.seed};
        if (second.encode_tile(place, total)) header.flags |= kHasNonFinite;
        sum.take(second.settled_bytes(first + n, dtype));
      });
  for (std::size_t i = 0; i < headers.size(); ++i) arrived[i].compare(headers[i]);
  sum.write(header);
  write_header(target.out, header);
}

std::size_t TileCodec::reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                                     Queue&) const {
  FloatEnvironment environment;
  const auto* to = dynamic_cast<const TileCodec*>(&second);
  if (!to) throw UnsupportedError("codec '" + second.spec() + "' cannot encode sums on a CPU");
  const std::size_t count = target.in.count;
  const DType dtype = target.in.dtype;
  std::vector<PayloadHeader> headers;
  for (std::size_t rank = 0; rank < args.payloads.size(); ++rank) {
    headers.push_back(open(args.payloads[rank], count, dtype, false));
    if (!target.origin && (headers.back().flags & kHasNonFinite))
      target.origin = static_cast<std::uint32_t>(rank + 1);
  }
  const auto header = to->header_for(target);
  is_wide(dtype) ? reduce_encode_as<double>(args, headers, *to, target, header)
                 : reduce_encode_as<float>(args, headers, *to, target, header);
  return sizeof header + header.body_bytes;
}

}  // namespace cccl
