#include "devices/cpu/tile_codec.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "devices/cpu/convert.h"
#include "devices/cpu/float_environment.h"
#include "devices/cpu/noise.h"
#include "devices/cpu/workers.h"

namespace cccl {
namespace {

bool is_wide(DType dtype) { return dtype == DType::kFloat64; }

std::byte* body_of(Bytes payload) {
  return const_cast<std::byte*>(payload.data()) + sizeof(PayloadHeader);
}

// Adds up a body's checksum tile by tile, while it is written or read and in the cache. Each piece
// of the values has a part of the body's start, and one thread at a time.
class RunningChecksum {
 public:
  // settled(n): how much of the body's start belongs to the first n values alone.
  template <class Settled>
  RunningChecksum(Bytes body, bool wanted, const Pieces& pieces, Settled settled)
      : body_(body), wanted_(wanted), parts_(pieces.size()) {
    for (std::size_t i = 0; i < parts_.size(); ++i)
      parts_[i].done = whole_words(settled(pieces.begin(i)));
  }

  void take(std::size_t piece, std::size_t settled) {
    auto& [done, sum] = parts_[piece];
    settled = whole_words(settled);
    if (!wanted_ || settled <= done) return;
    sum += checksum(body_.subspan(done, settled - done), done / 4);
    done = settled;
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
  struct alignas(64) Part {
    std::size_t done = 0;
    std::uint64_t sum = 0;
  };

  static std::size_t whole_words(std::size_t bytes) { return bytes / 4 * 4; }

  std::uint64_t whole() const {
    const std::size_t done = parts_.back().done;
    std::uint64_t sum = checksum(body_.subspan(done), done / 4);
    for (const auto& part : parts_) sum += part.sum;
    return sum;
  }

  Bytes body_;
  bool wanted_;
  std::vector<Part> parts_;
};

Pieces tiles_of(std::size_t count, DType dtype) { return pieces_of(count, kTile, size_of(dtype)); }

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
        pieces_(tiles_of(args.in.count, args.in.dtype)),
        sum_(body_, args.checksum, pieces_,
             [&](std::size_t n) { return codec.settled_bytes(n, args.in.dtype); }) {}

  const Pieces& pieces() const override { return pieces_; }

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
    if (non_finite_) header_.flags |= kHasNonFinite;
    sum_.write(header_);
    write_header(args_.out, header_);
    return sizeof header_ + header_.body_bytes;
  }

 private:
  template <class Real>
  void write_as(std::size_t first, std::size_t n, const Real* values) {
    if (codec_.encode_tile(tile(first, n), values)) non_finite_ = true;
    sum_.take(pieces_.of(first), codec_.settled_bytes(first + n, args_.in.dtype));
  }
  Tile tile(std::size_t first, std::size_t n) const {
    const auto [_, count, dtype] = args_.in;
    return {body_.data(), dtype, count, first, n, args_.position + first, args_.seed};
  }

  const TileCodec& codec_;
  EncodeArgs args_;
  PayloadHeader header_;
  MutableBytes body_;
  Pieces pieces_;
  RunningChecksum sum_;
  std::atomic<bool> non_finite_ = false;
};

std::unique_ptr<PayloadWriter> TileCodec::writer(const EncodeArgs& args) const {
  return std::make_unique<Writer>(*this, args);
}

template <class Real>
std::size_t TileCodec::encode_as(const EncodeArgs& args) const {
  const auto in = args.in;
  Writer writer(*this, args);
  const auto* values = in_place<const Real>(in.dtype, in.data);
  for_each_piece(writer.pieces(), [&](std::size_t piece) {
    Real tile[kTile];
    for_tiles(writer.pieces(), piece, [&](std::size_t first, std::size_t n) {
      if (!values) load(in.dtype, in.part(first, n).data, n, tile);
      writer.write(first, n, values ? values + first : tile);
    });
  });
  return writer.finish();
}

std::size_t TileCodec::encode(const EncodeArgs& args, Queue&) const {
  FloatEnvironment environment;
  return is_wide(args.in.dtype) ? encode_as<double>(args) : encode_as<float>(args);
}

template <class Real>
void TileCodec::decode_as(Bytes payload, std::uint64_t seed, Values out) const {
  auto* values = in_place<Real>(out.dtype, out.data);
  const auto pieces = tiles_of(out.count, out.dtype);
  for_each_piece(pieces, [&](std::size_t piece) {
    Real tile[kTile];
    for_tiles(pieces, piece, [&](std::size_t first, std::size_t n) {
      const Tile place{body_of(payload), out.dtype, out.count, first, n, 0, seed};
      decode_tile(place, values ? values + first : tile);
      if (values) return;
      if constexpr (std::is_same_v<Real, float>) saturate(out.dtype, tile, n);
      store(out.dtype, tile, n, out.part(first, n).data);
    });
  });
}

void TileCodec::decode(Bytes payload, Values out, Queue&) const {
  FloatEnvironment environment;
  const auto seed = open(payload, out.count, out.dtype).seed;
  is_wide(out.dtype) ? decode_as<double>(payload, seed, out) : decode_as<float>(payload, seed, out);
}

// use(first, n, total) gets the finished mean of each tile, on a thread per piece. Sums are made in
// `values` where that is not null. About to decode a tile, it calls arrive(payload's index, piece,
// values decoded after it). `noise`, if there is one, looks at what is decoded.
template <class Real, class Arrive, class Use>
void TileCodec::reduce_as(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                          const Pieces& pieces, DType dtype, Real* values, Arrive arrive, Use use,
                          NoiseSample* noise) const {
  for_each_piece(pieces, [&](std::size_t piece) {
    Real tile[kTile], term[kTile];
    NoiseColumns seen;
    for_tiles(pieces, piece, [&](std::size_t first, std::size_t n) {
      Real* const total = values ? values + first : tile;
      const bool measured = noise && NoiseSample::begins_at(first);
      for (std::size_t i = 0; i < args.payloads.size(); ++i) {
        const Tile place{
            body_of(args.payloads[i]), dtype, pieces.count, first, n, 0, headers[i].seed};
        arrive(i, piece, first + n);
        if (i == 0) {
          decode_tile(place, total);
        } else if (measured) {
          decode_tile(place, term);
          add(term, n, total);
        } else {
          add_tile(place, total);
        }
        if (measured) seen.take(i, n, i == 0 ? total : term);
      }
      if (measured) noise->set(first, seen.window(n, args.payloads.size()));
      finish_sum(dtype, args.divisor, total, n);
      use(first, n, total);
    });
  });
}

template <class Real>
void TileCodec::reduce_into(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                            Values out) const {
  auto* values = in_place<Real>(out.dtype, out.data);
  reduce_as<Real>(
      args, headers, tiles_of(out.count, out.dtype), out.dtype, values,
      [](std::size_t, std::size_t, std::size_t) {},
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
                       const Pieces& pieces, DType dtype, const Consume<Real>& consume,
                       NoiseSample* noise) const {
  const auto settled = [&](std::size_t n) { return settled_bytes(n, dtype); };
  std::vector<RunningChecksum> arrived;
  for (std::size_t i = 0; i < headers.size(); ++i)
    arrived.emplace_back(args.payloads[i].subspan(sizeof headers[i], headers[i].body_bytes),
                         headers[i].flags & kHasChecksum, pieces, settled);
  reduce_as<Real>(
      args, headers, pieces, dtype, nullptr,
      [&](std::size_t i, std::size_t piece, std::size_t n) { arrived[i].take(piece, settled(n)); },
      consume, noise);
  for (std::size_t i = 0; i < headers.size(); ++i) arrived[i].compare(headers[i]);
}

void TileCodec::sum(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                    const Pieces& pieces, DType dtype, const Consume<float>& consume) const {
  sum_as(args, headers, pieces, dtype, consume);
}

void TileCodec::sum(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                    const Pieces& pieces, DType dtype, const Consume<double>& consume) const {
  sum_as(args, headers, pieces, dtype, consume);
}

void TileCodec::sum_measured(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                             const Pieces& pieces, DType dtype, const Consume<float>& consume,
                             NoiseSample& noise) const {
  sum_as(args, headers, pieces, dtype, consume, &noise);
}

void TileCodec::sum_measured(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                             const Pieces& pieces, DType dtype, const Consume<double>& consume,
                             NoiseSample& noise) const {
  sum_as(args, headers, pieces, dtype, consume, &noise);
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
