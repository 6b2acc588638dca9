// lossless: exponents in few bits, sign and mantissa as they are. FORMAT.md.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api/measure.h"
#include "codecs/lossless/blocks.h"
#include "devices/cpu/convert.h"
#include "devices/cpu/cpu_codec.h"
#include "devices/cpu/float_environment.h"

namespace cccl {
namespace {

using namespace lossless;

static_assert(kBlock % kTile == 0, "blocks pass between codecs as tiles");

// Where a payload's blocks are.
class BlockReader {
 public:
  // From value `first` on, which begins a block. Throws CorruptPayloadError for a directory that
  // points outside the body.
  BlockReader(Bytes payload, std::size_t body_bytes, DType dtype, std::size_t count,
              std::size_t first = 0)
      : body_(payload.subspan(sizeof(PayloadHeader), body_bytes)),
        dtype_(dtype),
        count_(count),
        first_(first),
        next_(directory_bytes(count)) {
    if (next_ > body_bytes)
      throw CorruptPayloadError("lossless payload is damaged: its directory is cut short");
    if (first) next_ = end_of(first / kBlock - 1);
  }

  // Decodes the next block; `out` has its values.
  void read(std::byte* out) {
    const std::size_t n = std::min(kBlock, count_ - first_), block = first_ / kBlock;
    const bool last = first_ + n == count_;
    const std::size_t end = last ? body_.size() : end_of(block);
    if (end < next_ || end > body_.size())
      throw CorruptPayloadError("lossless payload is damaged: block " + std::to_string(block) +
                                " ends outside the body");
    decode_block(body_.subspan(next_, end - next_), last, {out, n, dtype_});
    next_ = end;
    first_ += n;
  }

 private:
  // Of a block that is not the last.
  std::size_t end_of(std::size_t block) const {
    std::uint32_t unit;
    std::memcpy(&unit, body_.data() + sizeof unit * block, sizeof unit);
    return kUnit * std::size_t{unit};
  }

  Bytes body_;
  DType dtype_;
  std::size_t count_, first_, next_;
};

Pieces blocks_of(std::size_t count, DType dtype) {
  return pieces_of(count, kBlock, size_of(dtype));
}

class Lossless final : public CpuCodec {
 public:
  Lossless(const CodecInfo& info, bool counts_all) : CpuCodec(info), counts_all_(counts_all) {}

  std::string spec() const override {
    return std::string("lossless(level=") + (counts_all_ ? "best" : "fast") + ")";
  }
  std::size_t granularity() const override { return kBlock; }
  bool supports(DType) const override { return true; }
  std::size_t max_encoded_bytes(std::size_t n, DType dtype) const override {
    return sizeof(PayloadHeader) + (codes(dtype) ? directory_bytes(n) : 0) + n * size_of(dtype);
  }
  void error_bound(ConstValues, std::span<double> bound) const override {
    std::ranges::fill(bound, 0.0);
  }

  std::size_t encode(const EncodeArgs& args, Queue&) const override;
  void decode(Bytes payload, Values out, Queue&) const override {
    const auto header = open(payload, out.count, out.dtype);
    if (!codes(out.dtype)) {
      if (out.count) std::memcpy(out.data, payload.data() + sizeof header, out.bytes());
      return;
    }
    const auto pieces = blocks_of(out.count, out.dtype);
    for_each_piece(pieces, [&](std::size_t piece) {
      const std::size_t begin = pieces.begin(piece), end = pieces.end(piece);
      BlockReader reader(payload, header.body_bytes, out.dtype, out.count, begin);
      for (std::size_t first = begin; first < end; first += kBlock)
        reader.read(static_cast<std::byte*>(out.part(first, 1).data));
    });
  }

  void reduce(const ReduceArgs& args, Values out, Queue&) const override {
    FloatEnvironment environment;
    std::vector<PayloadHeader> headers;
    for (const auto payload : args.payloads) headers.push_back(open(payload, out.count, out.dtype));
    const auto keep = [&](std::size_t first, std::size_t n, const auto* total) {
      store(out.dtype, total, n, out.part(first, n).data);
    };
    out.dtype == DType::kFloat64 ? sum_tiles<double>(args, headers, out.count, out.dtype, keep)
                                 : sum_tiles<float>(args, headers, out.count, out.dtype, keep);
  }

  std::unique_ptr<PayloadWriter> writer(const EncodeArgs& args) const override;

 protected:
  // Where values decide, blocks are compared with their bytes as they are read.
  std::size_t expected_bytes(const PayloadHeader& header, Bytes) const override {
    const std::size_t most =
        max_encoded_bytes(header.count, DType{header.dtype}) - sizeof(PayloadHeader);
    return codes(DType{header.dtype}) ? std::min<std::size_t>(header.body_bytes, most) : most;
  }
  void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers, const Pieces& pieces,
           DType dtype, const Consume<float>& consume) const override {
    check_bodies(args, headers);
    sum_tiles<float>(args, headers, pieces.count, dtype, consume);
  }
  void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers, const Pieces& pieces,
           DType dtype, const Consume<double>& consume) const override {
    check_bodies(args, headers);
    sum_tiles<double>(args, headers, pieces.count, dtype, consume);
  }

 private:
  class Writer;

  static void check_bodies(const ReduceArgs& args, std::span<const PayloadHeader> headers) {
    for (std::size_t i = 0; i < headers.size(); ++i)
      if (headers[i].flags & kHasChecksum)
        check_body(headers[i],
                   checksum(args.payloads[i].subspan(sizeof headers[i], headers[i].body_bytes)));
  }

  template <class Real, class Use>
  void sum_tiles(const ReduceArgs& args, std::span<const PayloadHeader> headers, std::size_t count,
                 DType dtype, Use use) const;

  bool counts_all_;
};

// Writes elements and sums, which it makes elements, block by block.
class Lossless::Writer final : public PayloadWriter {
 public:
  Writer(const Lossless& codec, const EncodeArgs& args)
      : codec_(codec),
        args_(args),
        header_(codec.header_for(args)),
        whole_(Pieces::one(args.in.count)) {
    const auto [_, count, dtype] = args.in;
    directory_ = args.out.data() + sizeof header_;
    at_ = directory_;
    if (!codes(dtype)) return;
    check_size(dtype, count);
    at_ += directory_bytes(count);
    std::memset(directory_, 0, directory_bytes(count));
  }

  const Pieces& pieces() const override { return whole_; }
  void write(std::size_t first, std::size_t n, const float* values) override {
    write_sums(first, n, values);
  }
  void write(std::size_t first, std::size_t n, const double* values) override {
    write_sums(first, n, values);
  }

  // All elements. Each thread begins a piece where it would be if no block in front of it became
  // shorter; then they move up.
  void write_all() {
    const auto values = args_.in;
    if (!codes(values.dtype)) return copy(values);
    const auto pieces = blocks_of(values.count, values.dtype);
    std::byte* const begin = at_;
    const auto place = [&](std::size_t piece) {
      return begin + pieces.begin(piece) * size_of(values.dtype);
    };
    std::vector<Encoded> found(pieces.size());
    for_each_piece(pieces, [&](std::size_t piece) {
      const std::size_t first = pieces.begin(piece);
      found[piece] = put_blocks(first, values.part(first, pieces.end(piece) - first), place(piece));
    });
    for (std::size_t piece = 0; piece < pieces.size(); ++piece)
      append(pieces.begin(piece), pieces.end(piece), place(piece), found[piece]);
  }

  std::size_t finish() override {
    header_.body_bytes = static_cast<std::size_t>(at_ - directory_);
    seal_payload(args_.out, header_, args_.checksum);
    return sizeof header_ + header_.body_bytes;
  }

 private:
  void copy(ConstValues values) {
    if (has_non_finite(values)) header_.flags |= kHasNonFinite;
    if (values.count) std::memcpy(at_, values.data, values.bytes());
    at_ += values.bytes();
  }

  // Block behind block; the first begins with value `first`. The directory gets how far from
  // `begin` each is.
  Encoded put_blocks(std::size_t first, ConstValues values, std::byte* begin) const {
    Encoded all{0, false};
    for (std::size_t at = 0; at < values.count; at += kBlock) {
      const auto block = values.part(at, std::min(kBlock, values.count - at));
      move_begin((first + at) / kBlock, all.bytes);
      const auto [bytes, non_finite] = encode_block(block, codec_.counts_all_, begin + all.bytes);
      all.non_finite |= non_finite;
      all.bytes += bytes;
      if (first + at + block.count == args_.in.count) break;
      std::memset(begin + all.bytes, 0, in_units(bytes) - bytes);
      all.bytes += in_units(bytes) - bytes;
    }
    return all;
  }

  // Behind all others, the blocks of values [first, end) that put_blocks() left at `from`.
  void append(std::size_t first, std::size_t end, const std::byte* from, const Encoded& found) {
    if (from != at_) std::memmove(at_, from, found.bytes);
    for (std::size_t value = first; value < end; value += kBlock)
      move_begin(value / kBlock, static_cast<std::size_t>(at_ - directory_));
    at_ += found.bytes;
    if (found.non_finite) header_.flags |= kHasNonFinite;
  }

  // In the directory, which begins as zeros, and does not have the first block.
  void move_begin(std::size_t block, std::size_t bytes) const {
    if (block == 0) return;
    std::byte* const entry = directory_ + sizeof(std::uint32_t) * (block - 1);
    std::uint32_t unit;
    std::memcpy(&unit, entry, sizeof unit);
    unit += static_cast<std::uint32_t>(bytes / kUnit);
    std::memcpy(entry, &unit, sizeof unit);
  }

  template <class Real>
  void write_sums(std::size_t first, std::size_t n, const Real* values) {
    const auto [_, count, dtype] = args_.in;
    const std::size_t within = codes(dtype) ? first % kBlock : 0;
    store(dtype, values, n, held_ + within * size_of(dtype));
    const bool complete = !codes(dtype) || within + n == kBlock || first + n == count;
    if (!complete) return;
    const ConstValues elements{held_, within + n, dtype};
    if (!codes(dtype)) return copy(elements);
    append(first - within, first + n, at_, put_blocks(first - within, elements, at_));
  }

  const Lossless& codec_;
  EncodeArgs args_;
  PayloadHeader header_;
  Pieces whole_;  // of sums: where a block begins is known once those in front are written
  std::byte *directory_, *at_;
  alignas(64) std::byte held_[kBlock * sizeof(float)];
};
static_assert(kTile * sizeof(double) <= kBlock * sizeof(float));

std::unique_ptr<PayloadWriter> Lossless::writer(const EncodeArgs& args) const {
  return std::make_unique<Writer>(*this, args);
}

std::size_t Lossless::encode(const EncodeArgs& args, Queue&) const {
  Writer writer(*this, args);
  writer.write_all();
  return writer.finish();
}

// use(first, n, total) gets the finished mean of one tile after the other.
template <class Real, class Use>
void Lossless::sum_tiles(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                         std::size_t count, DType dtype, Use use) const {
  std::vector<BlockReader> readers;
  for (std::size_t i = 0; codes(dtype) && i < headers.size(); ++i)
    readers.emplace_back(args.payloads[i], headers[i].body_bytes, dtype, count);
  alignas(64) Real total[kBlock], term[kBlock];
  alignas(64) std::byte elements[kBlock * sizeof(Real)];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = std::min(kBlock, count - first);
    for (std::size_t i = 0; i < args.payloads.size(); ++i) {
      const std::byte* from = elements;
      if (codes(dtype))
        readers[i].read(elements);
      else
        from = args.payloads[i].data() + sizeof(PayloadHeader) + first * size_of(dtype);
      load(dtype, from, n, i == 0 ? total : term);
      if (i) add(term, n, total);
    }
    finish_sum(dtype, args.divisor, total, n);
    for (std::size_t at = 0; at < n; at += kTile)
      use(first + at, std::min(kTile, n - at), total + at);
  }
}

std::unique_ptr<Codec> make(const CodecInfo& info, OptionReader& options) {
  constexpr std::string_view kLevels[] = {"fast", "best"};
  return std::make_unique<Lossless>(info, options.choice("level", kLevels) == "best");
}

std::unique_ptr<Codec> reopen(const CodecInfo& info, const PayloadHeader&) {
  return std::make_unique<Lossless>(info, false);
}

const CodecEntry kEntries[] = {{{11, "lossless", {}, true, false}, make, reopen}};

}  // namespace

std::span<const CodecEntry> lossless_codecs() { return kEntries; }

}  // namespace cccl
