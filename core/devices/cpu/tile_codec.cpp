#include "devices/cpu/tile_codec.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "devices/cpu/convert.h"
#include "devices/cpu/float_environment.h"
#include "devices/cpu/noise.h"

namespace cccl {
namespace {

bool is_wide(DType dtype) { return dtype == DType::kFloat64; }

std::byte* body_of(Bytes payload) {
  return const_cast<std::byte*>(payload.data()) + sizeof(PayloadHeader);
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

class TileCodec::Writer final : public PayloadWriter {
 public:
  Writer(const TileCodec& codec, const EncodeArgs& args)
      : codec_(codec),
        args_(args),
        header_(codec.header_for(args)),
        body_(args.out.subspan(sizeof header_, header_.body_bytes)),
        sum_(body_, args.checksum) {}

  void write(std::size_t first, std::size_t n, const float* values) override {
    write_as(first, n, values);
  }
  void write(std::size_t first, std::size_t n, const double* values) override {
    write_as(first, n, values);
  }

  void written(std::size_t first, std::size_t n, float* values) override {
    codec_.decode_tile(tile(first, n), values);
  }
  void written(std::size_t first, std::size_t n, double* values) override {
    codec_.decode_tile(tile(first, n), values);
  }

  std::size_t finish() override {
    sum_.write(header_);
    write_header(args_.out, header_);
    return sizeof header_ + header_.body_bytes;
  }

 private:
  template <class Real>
  void write_as(std::size_t first, std::size_t n, const Real* values) {
    if (codec_.encode_tile(tile(first, n), values)) header_.flags |= kHasNonFinite;
    sum_.take(codec_.settled_bytes(first + n, args_.in.dtype));
  }
  Tile tile(std::size_t first, std::size_t n) const {
    const auto [_, count, dtype] = args_.in;
    return {body_.data(), dtype, count, first, n, args_.position + first, args_.seed};
  }

  const TileCodec& codec_;
  EncodeArgs args_;
  PayloadHeader header_;
  MutableBytes body_;
  RunningChecksum sum_;
};

std::unique_ptr<PayloadWriter> TileCodec::writer(const EncodeArgs& args) const {
  return std::make_unique<Writer>(*this, args);
}

template <class Real>
std::size_t TileCodec::encode_as(const EncodeArgs& args) const {
  const auto in = args.in;
  Writer writer(*this, args);
  const auto* values = in_place<const Real>(in.dtype, in.data);
  Real tile[kTile];
  for (std::size_t first = 0; first < in.count; first += kTile) {
    const std::size_t n = std::min(kTile, in.count - first);
    if (!values) load(in.dtype, in.part(first, n).data, n, tile);
    writer.write(first, n, values ? values + first : tile);
  }
  return writer.finish();
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

// use(first, n, total) gets the finished mean of one tile after the other. Sums are made in
// `values` where that is not null. About to decode a tile, it calls arrive(payload's index, values
// decoded after it). `noise`, if there is one, looks at what is decoded.
template <class Real, class Arrive, class Use>
void TileCodec::reduce_as(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                          std::size_t count, DType dtype, Real* values, Arrive arrive, Use use,
                          NoiseSample* noise) const {
  Real tile[kTile], term[kTile];
  for (std::size_t first = 0; first < count; first += kTile) {
    const std::size_t n = std::min(kTile, count - first);
    Real* const total = values ? values + first : tile;
    const bool measured = noise && NoiseSample::begins_at(first);
    for (std::size_t i = 0; i < args.payloads.size(); ++i) {
      const Tile place{body_of(args.payloads[i]), dtype, count, first, n, 0, headers[i].seed};
      arrive(i, first + n);
      if (i == 0) {
        decode_tile(place, total);
      } else if (measured) {
        decode_tile(place, term);
        add(term, n, total);
      } else {
        add_tile(place, total);
      }
      if (measured) noise->take(i, n, i == 0 ? total : term);
    }
    finish_sum(dtype, args.divisor, total, n);
    use(first, n, total);
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

// Takes checksums of the bodies as it reads them.
template <class Real>
void TileCodec::sum_as(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                       std::size_t count, DType dtype, const Consume<Real>& consume,
                       NoiseSample* noise) const {
  std::vector<RunningChecksum> arrived;
  for (std::size_t i = 0; i < headers.size(); ++i)
    arrived.emplace_back(args.payloads[i].subspan(sizeof headers[i], headers[i].body_bytes),
                         headers[i].flags & kHasChecksum);
  reduce_as<Real>(
      args, headers, count, dtype, nullptr,
      [&](std::size_t i, std::size_t n) { arrived[i].take(settled_bytes(n, dtype)); }, consume,
      noise);
  for (std::size_t i = 0; i < headers.size(); ++i) arrived[i].compare(headers[i]);
}

void TileCodec::sum(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                    std::size_t count, DType dtype, const Consume<float>& consume) const {
  sum_as(args, headers, count, dtype, consume);
}

void TileCodec::sum(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                    std::size_t count, DType dtype, const Consume<double>& consume) const {
  sum_as(args, headers, count, dtype, consume);
}

void TileCodec::sum_measured(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                             std::size_t count, DType dtype, const Consume<float>& consume,
                             NoiseSample& noise) const {
  sum_as(args, headers, count, dtype, consume, &noise);
}

void TileCodec::sum_measured(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                             std::size_t count, DType dtype, const Consume<double>& consume,
                             NoiseSample& noise) const {
  sum_as(args, headers, count, dtype, consume, &noise);
}

std::shared_ptr<const TileCodec> inner_of(const PayloadHeader& header, const CodecInfo& outer) {
  auto held = header;
  held.codec = header.params[3];
  held.params[3] = 0;
  for (const auto* entry : registered_codecs()) {
    if (entry->info.id != held.codec || held.codec == outer.id) continue;
    std::shared_ptr<const Codec> inner = entry->reopen(entry->info, held);
    return std::dynamic_pointer_cast<const TileCodec>(inner);
  }
  return nullptr;
}

}  // namespace cccl
