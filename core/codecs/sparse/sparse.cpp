// sparse: only values that are not zero, and where they are. FORMAT.md.
#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "codecs/sparse/cells.h"
#include "devices/cpu/convert.h"
#include "devices/cpu/float_environment.h"

namespace cccl {
namespace {

using namespace sparse;

// The bits of a magnitude in that type, and those of Inf; 0 where there is none.
std::pair<std::uint64_t, std::uint64_t> infinity_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return {0x7FFFFFFFu, 0x7F800000u};
    case DType::kFloat16: return {0x7FFFu, 0x7C00u};
    case DType::kBFloat16: return {0x7FFFu, 0x7F80u};
    case DType::kFloat64: return {0x7FFFFFFFFFFFFFFFu, 0x7FF0000000000000u};
    default: return {0, 0};
  }
}

class Sparse final : public CpuCodec {
 public:
  Sparse(const CodecInfo& info, std::shared_ptr<const TileCodec> inner, const Settings& settings)
      : CpuCodec(info), inner_(std::move(inner)), settings_(settings) {}

  std::string spec() const override;
  std::size_t granularity() const override { return kCell; }
  bool supports(DType dtype) const override {
    return info().lossless ? inner_->supports(dtype) : is_floating(dtype);
  }
  std::size_t max_encoded_bytes(std::size_t n, DType dtype) const override {
    return sizeof(PayloadHeader) + sizeof(Entry) * cells_of(n) +
           n / kCell * padded(inner_->body_bytes(kCell, dtype)) +
           padded(inner_->body_bytes(n % kCell, dtype));
  }
  void error_bound(ConstValues in, std::span<double> bound) const override;

  void write_params(std::uint8_t (&params)[4]) const override {
    inner_->write_params(params);
    params[3] = inner_->info().id;
  }

  std::size_t encode(const EncodeArgs& args, Queue&) const override;
  void decode(Bytes payload, Values out, Queue&) const override;
  void reduce(const ReduceArgs& args, Values out, Queue&) const override;
  std::unique_ptr<PayloadWriter> writer(const EncodeArgs& args) const override;

  const Settings& settings() const { return settings_; }
  std::shared_ptr<const Codec> inner() const { return inner_; }

 protected:
  std::size_t expected_bytes(const PayloadHeader& header, Bytes payload) const override;
  void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers, const Pieces& pieces,
           DType dtype, const Consume<float>& consume) const override {
    sum_as<float>(args, headers, pieces.count, dtype, consume);
  }
  void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers, const Pieces& pieces,
           DType dtype, const Consume<double>& consume) const override {
    sum_as<double>(args, headers, pieces.count, dtype, consume);
  }

 private:
  class Writer;

  // Whether values are kept as they lie in memory.
  bool keeps_elements() const { return inner_->info().lossless; }

  template <class Real>
  void choose(const std::byte* elements, const Real* values, std::size_t n, DType dtype,
              Places& found) const;
  template <class Real>
  void decode_as(Bytes payload, Values out) const;
  void decode_elements(Bytes payload, Values out) const;
  template <class Real>
  void sum_as(const ReduceArgs& args, std::span<const PayloadHeader> headers, std::size_t count,
              DType dtype, const Consume<Real>& consume) const;
  template <class Real, class Use>
  void sum_cells(const ReduceArgs& args, std::size_t count, DType dtype, Use use) const;

  std::shared_ptr<const TileCodec> inner_;
  Settings settings_;
};

std::string shortest(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string Sparse::spec() const {
  return "sparse(inner=" + inner_->spec() + ", sparsity_threshold=" + shortest(settings_.sparsity) +
         (settings_.top_k > 0 ? ", top_k=" + shortest(settings_.top_k) : "") +
         (settings_.threshold > 0 ? ", threshold=" + shortest(settings_.threshold) : "") + ")";
}

// Looks at `elements` where values are exact, else at `values`.
template <class Real>
void Sparse::choose(const std::byte* elements, const Real* values, std::size_t n, DType dtype,
                    Places& found) const {
  if (info().lossless)
    select_elements(elements, n, size_of(dtype), found.mask);
  else
    select_values(settings_, values, n, found.mask);
  choose_form(settings_, *inner_, dtype, n, found);
}

class Sparse::Writer final : public PayloadWriter {
 public:
  Writer(const Sparse& codec, const EncodeArgs& args)
      : codec_(codec),
        args_(args),
        header_(codec.header_for(args)),
        whole_(Pieces::one(args.in.count)),
        directory_(args.out.data() + sizeof header_),
        at_(directory_ + sizeof(Entry) * cells_of(args.in.count)) {}

  const Pieces& pieces() const override { return whole_; }
  void write(std::size_t first, std::size_t n, const float* values) override {
    write_sums(first, n, values);
  }
  void write(std::size_t first, std::size_t n, const double* values) override {
    write_sums(first, n, values);
  }

  // Looks at `elements` where the inner codec keeps them, and at `values` where it does not or some
  // are dropped.
  template <class Real>
  void write_cell(std::size_t first, std::size_t n, const std::byte* elements, const Real* values) {
    const auto dtype = args_.in.dtype;
    const auto& places = places_;
    codec_.choose(elements, values, n, dtype, places_);
    const std::size_t held = places.entry.values, bytes = codec_.inner_->body_bytes(held, dtype);
    std::memcpy(directory_ + sizeof(Entry) * (first / kCell), &places.entry, sizeof(Entry));
    values_ = at_ = write_positions(places, n, at_);
    const bool non_finite = codec_.keeps_elements() ? hold_elements(places, elements)
                                                    : hold_values(places, first, values);
    if (non_finite) header_.flags |= kHasNonFinite;
    std::fill(at_ + bytes, at_ + padded(bytes), std::byte{0});
    at_ += padded(bytes);
  }

  void written(std::size_t, std::size_t n, float* values) override { written_as(n, values); }
  void written(std::size_t, std::size_t n, double* values) override { written_as(n, values); }

  std::size_t finish() override {
    header_.body_bytes = static_cast<std::size_t>(at_ - args_.out.data()) - sizeof header_;
    seal_payload(args_.out, header_, args_.checksum);
    return sizeof header_ + header_.body_bytes;
  }

 private:
  template <class Real>
  void write_sums(std::size_t first, std::size_t n, const Real* values) {
    std::byte stored[kCell * sizeof(double)];
    if (codec_.keeps_elements()) store(args_.in.dtype, values, n, stored);
    write_cell(first, n, stored, values);
  }

  // Of the cell written last.
  template <class Real>
  void written_as(std::size_t n, Real* values) const {
    const std::size_t held = places_.entry.values;
    const Tile tile{values_, args_.in.dtype, held, 0, held, 0, args_.seed};
    if (places_.entry.form == Form::kDense) return codec_.inner_->decode_tile(tile, values);
    alignas(64) Real kept[kCell];
    if (held) codec_.inner_->decode_tile(tile, kept);
    std::fill_n(values, n, Real{0});
    kernels_for(sizeof(Real)).scatter(bytes_of(kept), places_.at, held, bytes_of(values));
  }

  // Whether one of them is Inf or NaN.
  bool hold_elements(const Places& places, const std::byte* elements) {
    const std::size_t size = size_of(args_.in.dtype), held = places.entry.values;
    if (places.entry.form == Form::kDense)
      std::memcpy(at_, elements, held * size);
    else
      kernels_for(size).gather(elements, places.at, held, at_);
    const auto [magnitude, infinity] = infinity_of(args_.in.dtype);
    return magnitude && kernels_for(size).count(at_, held, magnitude, infinity) > 0;
  }

  template <class Real>
  bool hold_values(const Places& places, std::size_t first, const Real* values) {
    const std::size_t held = places.entry.values;
    if (held == 0) return false;
    alignas(64) Real kept[kCell];
    if (places.entry.form != Form::kDense) {
      kernels_for(sizeof(Real)).gather(bytes_of(values), places.at, held, bytes_of(kept));
      values = kept;
    }
    return codec_.inner_->encode_tile(
        {at_, args_.in.dtype, held, 0, held, args_.position + first, args_.seed}, values);
  }

  const Sparse& codec_;
  EncodeArgs args_;
  PayloadHeader header_;
  Pieces whole_;  // where a cell begins is known once those in front are written
  std::byte *directory_, *at_;
  Places places_;                // of the cell written last
  std::byte* values_ = nullptr;  // and where its values are
};

std::unique_ptr<PayloadWriter> Sparse::writer(const EncodeArgs& args) const {
  return std::make_unique<Writer>(*this, args);
}

std::size_t Sparse::encode(const EncodeArgs& args, Queue&) const {
  FloatEnvironment environment;
  const auto in = args.in;
  Writer writer(*this, args);
  const auto encode_as = [&]<class Real>(Real) {
    const auto* values = in_place<const Real>(in.dtype, in.data);
    alignas(64) Real tile[kCell];
    for (std::size_t first = 0; first < in.count; first += kCell) {
      const auto part = in.part(first, std::min(kCell, in.count - first));
      if (!values && !info().lossless) load(in.dtype, part.data, part.count, tile);
      writer.write_cell(first, part.count, static_cast<const std::byte*>(part.data),
                        values ? values + first : tile);
    }
  };
  in.dtype == DType::kFloat64 ? encode_as(double{}) : encode_as(float{});
  return writer.finish();
}

std::size_t Sparse::expected_bytes(const PayloadHeader& header, Bytes payload) const {
  const auto count = static_cast<std::size_t>(header.count);
  const std::size_t directory = sizeof(Entry) * cells_of(count);
  if (directory > header.body_bytes) return directory;
  return directory +
         bytes_of_cells(payload.data() + sizeof header, *inner_, DType{header.dtype}, count);
}

void Sparse::decode_elements(Bytes payload, Values out) const {
  const std::size_t size = size_of(out.dtype);
  CellReader reader(payload, *inner_, out.dtype, out.count);
  for (std::size_t first = 0; first < out.count; first += kCell) {
    const auto part = out.part(first, std::min(kCell, out.count - first));
    auto* to = static_cast<std::byte*>(part.data);
    reader.advance();
    if (reader.dense()) {
      std::memcpy(to, reader.elements(), part.bytes());
      continue;
    }
    std::memset(to, 0, part.bytes());
    kernels_for(size).scatter(reader.elements(), reader.places(), reader.held(), to);
  }
}

template <class Real>
void Sparse::decode_as(Bytes payload, Values out) const {
  auto* values = in_place<Real>(out.dtype, out.data);
  alignas(64) Real tile[kCell], held[kCell];
  CellReader reader(payload, *inner_, out.dtype, out.count);
  for (std::size_t first = 0; first < out.count; first += kCell) {
    const std::size_t n = std::min(kCell, out.count - first);
    Real* const to = values ? values + first : tile;
    reader.advance();
    reader.decode(reader.dense() ? to : held);
    if (!reader.dense()) {
      std::fill_n(to, n, Real{0});
      kernels_for(sizeof(Real))
          .scatter(bytes_of(held), reader.places(), reader.held(), bytes_of(to));
    }
    if (values) continue;
    if constexpr (std::is_same_v<Real, float>) saturate(out.dtype, tile, n);
    store(out.dtype, tile, n, out.part(first, n).data);
  }
}

void Sparse::decode(Bytes payload, Values out, Queue&) const {
  FloatEnvironment environment;
  open(payload, out.count, out.dtype);
  if (keeps_elements()) return decode_elements(payload, out);
  out.dtype == DType::kFloat64 ? decode_as<double>(payload, out) : decode_as<float>(payload, out);
}

// use(first, n, total) gets the finished mean of one cell after the other. Only what payloads
// hold is added: a zero changes no sum but one of -0.0, which the first payload alone can begin.
template <class Real, class Use>
void Sparse::sum_cells(const ReduceArgs& args, std::size_t count, DType dtype, Use use) const {
  std::vector<CellReader> readers;
  for (const auto payload : args.payloads) readers.emplace_back(payload, *inner_, dtype, count);
  alignas(64) Real total[kCell], held[kCell], term[kCell];
  const auto spread = [&](const CellReader& reader, std::size_t n, Real* to) {
    reader.decode(reader.dense() ? to : held);
    if (reader.dense()) return;
    std::fill_n(to, n, Real{0});
    kernels_for(sizeof(Real)).scatter(bytes_of(held), reader.places(), reader.held(), bytes_of(to));
  };
  for (std::size_t first = 0; first < count; first += kCell) {
    const std::size_t n = std::min(kCell, count - first);
    bool minus_zero = false;
    for (std::size_t i = 0; i < readers.size(); ++i) {
      auto& reader = readers[i];
      reader.advance();
      if (i == 0) {
        spread(reader, n, total);
        for (std::size_t v = 0; v < n; ++v)
          minus_zero |= std::bit_cast<Bits<Real>>(total[v]) == kMagnitude<Real> + 1;
      } else if (reader.dense() || minus_zero) {
        spread(reader, n, term);
        add(term, n, total);
      } else {
        reader.decode(held);
        for (std::size_t v = 0; v < reader.held(); ++v) total[reader.places()[v]] += held[v];
      }
    }
    finish_sum(dtype, args.divisor, total, n);
    use(first, n, total);
  }
}

template <class Real>
void Sparse::sum_as(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                    std::size_t count, DType dtype, const Consume<Real>& consume) const {
  for (std::size_t i = 0; i < headers.size(); ++i) {
    const auto body = args.payloads[i].subspan(sizeof headers[i], headers[i].body_bytes);
    if (headers[i].flags & kHasChecksum) check_body(headers[i], checksum(body));
  }
  sum_cells<Real>(args, count, dtype, consume);
}

void Sparse::reduce(const ReduceArgs& args, Values out, Queue&) const {
  FloatEnvironment environment;
  for (const auto payload : args.payloads) open(payload, out.count, out.dtype);
  const auto keep = [&](std::size_t first, std::size_t n, const auto* total) {
    store(out.dtype, total, n, out.part(first, n).data);
  };
  out.dtype == DType::kFloat64 ? sum_cells<double>(args, out.count, out.dtype, keep)
                               : sum_cells<float>(args, out.count, out.dtype, keep);
}

void Sparse::error_bound(ConstValues in, std::span<double> bound) const {
  const bool wide = in.dtype == DType::kFloat64;
  std::vector<double> doubles(kCell), kept_bound(kCell);
  std::vector<float> floats(kCell);
  std::vector<std::byte> kept(kCell * sizeof(double));
  for (std::size_t first = 0; first < in.count; first += kCell) {
    const auto part = in.part(first, std::min(kCell, in.count - first));
    const auto* elements = static_cast<const std::byte*>(part.data);
    const auto of_part = bound.subspan(first, part.count);
    if (!info().lossless)
      wide ? load(in.dtype, elements, part.count, doubles.data())
           : load(in.dtype, elements, part.count, floats.data());
    Places places;
    wide ? choose(elements, doubles.data(), part.count, in.dtype, places)
         : choose(elements, floats.data(), part.count, in.dtype, places);
    if (places.entry.form == Form::kDense) {
      inner_->error_bound(part, of_part);
      continue;
    }
    for (std::size_t i = 0; i < part.count; ++i)
      of_part[i] = info().lossless ? 0.0 : std::abs(value_at(part, i));  // dropped, unless below
    const std::size_t held = places.entry.values;
    kernels_for(size_of(in.dtype)).gather(elements, places.at, held, kept.data());
    inner_->error_bound({kept.data(), held, in.dtype}, std::span(kept_bound).first(held));
    for (std::size_t i = 0; i < held; ++i) of_part[places.at[i]] = kept_bound[i];
  }
}

std::unique_ptr<Codec> make(const CodecInfo& info, OptionReader& options) {
  constexpr std::string_view kRotations[] = {"none"};
  Settings settings;
  settings.sparsity = options.number("sparsity_threshold", settings.sparsity);
  settings.top_k = options.number("top_k", 0);
  settings.threshold = options.number("threshold", 0);
  if (!(settings.sparsity >= 0 && settings.sparsity <= 1))
    options.refuse("sparsity_threshold", "a number from 0 to 1");
  if (options.given("top_k") && !(settings.top_k > 0 && settings.top_k <= 1))
    options.refuse("top_k", "a share of the values, more than 0 and at most 1");
  if (options.given("threshold") && !(settings.threshold > 0 && std::isfinite(settings.threshold)))
    options.refuse("threshold", "a finite magnitude, more than 0");
  if (options.given("threshold") && options.given("top_k"))
    options.refuse("threshold", "one of top_k and threshold");
  options.choice("rotation", kRotations);  // it would leave no zeros
  auto inner = std::dynamic_pointer_cast<const TileCodec>(options.inner("inner", "identity"));
  if (!inner || !inner->may_be_inner())
    options.refuse("inner", "a codec that holds every value, and none within another");
  auto own = info;
  own.lossless = inner->info().lossless && !settings.drops();
  return std::make_unique<Sparse>(own, std::move(inner), settings);
}

std::unique_ptr<Codec> reopen(const CodecInfo& info, const PayloadHeader& header) {
  auto inner = cccl::inner_of(header, info);
  if (!inner)
    throw CorruptPayloadError("sparse payload has an unknown inner codec, number " +
                              std::to_string(header.params[3]));
  auto own = info;
  own.lossless = inner->info().lossless;
  return std::make_unique<Sparse>(own, std::move(inner), Settings{});
}

const CodecEntry kEntries[] = {{{10, "sparse", {}, true, false}, make, reopen}};

}  // namespace

const Settings& sparse::settings_of(const Codec& codec) {
  return dynamic_cast<const Sparse&>(codec).settings();
}

std::shared_ptr<const Codec> sparse::inner_of(const Codec& codec) {
  return dynamic_cast<const Sparse&>(codec).inner();
}

std::span<const CodecEntry> sparse_codecs() { return kEntries; }

}  // namespace cccl
