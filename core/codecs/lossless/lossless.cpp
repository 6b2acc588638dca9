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
  // Throws CorruptPayloadError for a directory that points outside the body.
  BlockReader(Bytes payload, std::size_t body_bytes, DType dtype, std::size_t count)
      : body_(payload.subspan(sizeof(PayloadHeader), body_bytes)),
        dtype_(dtype),
        count_(count),
        next_(directory_bytes(count)) {
    if (next_ > body_bytes)
      throw CorruptPayloadError("lossless payload is damaged: its directory is cut short");
  }

  // Decodes the next block; `out` has its values.
  void read(std::byte* out) {
    const std::size_t n = std::min(kBlock, count_ - first_), block = first_ / kBlock;
    const bool last = first_ + n == count_;
    std::size_t end = body_.size();
    if (!last) {
      std::uint32_t unit;
      std::memcpy(&unit, body_.data() + sizeof unit * block, sizeof unit);
      end = kUnit * std::size_t{unit};
    }
    if (end < next_ || end > body_.size())
      throw CorruptPayloadError("lossless payload is damaged: block " + std::to_string(block) +
                                " ends outside the body");
    decode_block(body_.subspan(next_, end - next_), last, {out, n, dtype_});
    next_ = end;
    first_ += n;
  }

 private:
  Bytes body_;
  DType dtype_;
  std::size_t count_, first_ = 0, next_;
};

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
    BlockReader reader(payload, header.body_bytes, out.dtype, out.count);
    for (std::size_t first = 0; first < out.count; first += kBlock)
      reader.read(static_cast<std::byte*>(out.part(first, 1).data));
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
  void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers, std::size_t count,
           DType dtype, const Consume<float>& consume) const override {
    check_bodies(args, headers);
    sum_tiles<float>(args, headers, count, dtype, consume);
  }
  void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers, std::size_t count,
           DType dtype, const Consume<double>& consume) const override {
    check_bodies(args, headers);
    sum_tiles<double>(args, headers, count, dtype, consume);
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
      : codec_(codec), args_(args), header_(codec.header_for(args)) {
    const auto [_, count, dtype] = args.in;
    directory_ = args.out.data() + sizeof header_;
    at_ = directory_;
    if (!codes(dtype)) return;
    check_size(dtype, count);
    at_ += directory_bytes(count);
    std::memset(directory_, 0, directory_bytes(count));
  }

  void write(std::size_t first, std::size_t n, const float* values) override {
    write_sums(first, n, values);
  }
  void write(std::size_t first, std::size_t n, const double* values) override {
    write_sums(first, n, values);
  }

  // From `first` on, which begins a block: whole blocks, and the last.
  void write_elements(std::size_t first, ConstValues values) {
    if (!codes(values.dtype)) {
      if (has_non_finite(values)) header_.flags |= kHasNonFinite;
      if (values.count) std::memcpy(at_, values.data, values.bytes());
      at_ += values.bytes();
      return;
    }
    for (std::size_t at = 0; at < values.count; at += kBlock)
      write_block(first + at, values.part(at, std::min(kBlock, values.count - at)));
  }

  std::size_t finish() override {
    header_.body_bytes = static_cast<std::size_t>(at_ - directory_);
    seal_payload(args_.out, header_, args_.checksum);
    return sizeof header_ + header_.body_bytes;
  }

 private:
  void write_block(std::size_t first, ConstValues block) {
    if (first) {
      const auto unit = static_cast<std::uint32_t>((at_ - directory_) / kUnit);
      std::memcpy(directory_ + sizeof unit * (first / kBlock - 1), &unit, sizeof unit);
    }
    const auto [bytes, non_finite] = encode_block(block, codec_.counts_all_, at_);
    if (non_finite) header_.flags |= kHasNonFinite;
    at_ += bytes;
    if (first + block.count == args_.in.count) return;
    std::memset(at_, 0, in_units(bytes) - bytes);
    at_ += in_units(bytes) - bytes;
  }

  template <class Real>
  void write_sums(std::size_t first, std::size_t n, const Real* values) {
    const auto [_, count, dtype] = args_.in;
    const std::size_t within = codes(dtype) ? first % kBlock : 0;
    store(dtype, values, n, held_ + within * size_of(dtype));
    const bool complete = !codes(dtype) || within + n == kBlock || first + n == count;
    if (complete) write_elements(first - within, {held_, within + n, dtype});
  }

  const Lossless& codec_;
  EncodeArgs args_;
  PayloadHeader header_;
  std::byte *directory_, *at_;
  alignas(64) std::byte held_[kBlock * sizeof(float)];
};
static_assert(kTile * sizeof(double) <= kBlock * sizeof(float));

std::unique_ptr<PayloadWriter> Lossless::writer(const EncodeArgs& args) const {
  return std::make_unique<Writer>(*this, args);
}

std::size_t Lossless::encode(const EncodeArgs& args, Queue&) const {
  Writer writer(*this, args);
  writer.write_elements(0, args.in);
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
