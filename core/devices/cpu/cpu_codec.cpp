#include "devices/cpu/cpu_codec.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/cpu/convert.h"
#include "devices/cpu/float_environment.h"
#include "devices/cpu/noise.h"
#include "devices/cpu/residual.h"

namespace cccl {

void PayloadWriter::written(std::size_t, std::size_t, float*) {
  throw Error("a codec that loses nothing leaves no residual");
}

void PayloadWriter::written(std::size_t, std::size_t, double*) {
  throw Error("a codec that loses nothing leaves no residual");
}

PayloadHeader CpuCodec::header_for(const EncodeArgs& args) const {
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

PayloadHeader CpuCodec::open(Bytes payload, std::size_t count, DType dtype,
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
  else if (const auto bytes = expected_bytes(header, payload); header.body_bytes != bytes)
    wrong = "its body has " + std::to_string(header.body_bytes) + " bytes, expected " +
            std::to_string(bytes);
  if (!wrong.empty()) throw CorruptPayloadError("unexpected payload: " + wrong);
  return header;
}

void CpuCodec::refuse_to_measure() const {
  throw UnsupportedError("codec '" + spec() +
                         "' cannot measure the noise between ranks: send measured steps as a codec "
                         "of fixed size, such as block_float8");
}

// The target counts only once its header is written, after all checks.
std::size_t CpuCodec::reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                                    const Residual* residual) const {
  FloatEnvironment environment;
  const auto* to = dynamic_cast<const CpuCodec*>(&second);
  if (!to) throw UnsupportedError("codec '" + second.spec() + "' cannot encode sums on a CPU");
  const std::size_t count = target.in.count;
  const DType dtype = target.in.dtype;
  std::vector<PayloadHeader> headers;
  for (std::size_t rank = 0; rank < args.payloads.size(); ++rank) {
    headers.push_back(open(args.payloads[rank], count, dtype, false));
    if (!target.origin && (headers.back().flags & kHasNonFinite))
      target.origin = static_cast<std::uint32_t>(rank + 1);
  }
  auto writer = to->writer(target);
  if (residual) writer = correcting(std::move(writer), *residual, dtype, true);
  const auto write = [&](std::size_t first, std::size_t n, const auto* total) {
    writer->write(first, n, total);
  };
  std::optional<NoiseSample> noise;
  if (args.measures) noise.emplace(args.payloads.size(), count);
  const auto sum_as = [&]<class Real>(Real) {
    const Consume<Real> consume(write);
    noise ? sum_measured(args, headers, writer->pieces(), dtype, consume, *noise)
          : sum(args, headers, writer->pieces(), dtype, consume);
  };
  dtype == DType::kFloat64 ? sum_as(double{}) : sum_as(float{});
  const auto size = writer->finish();
  if (noise) {
    PayloadHeader header;
    std::memcpy(&header, target.out.data(), sizeof header);
    header.statistics = noise->statistics();
    write_header(target.out, header);
  }
  return size;
}

std::size_t CpuCodec::encode(const EncodeArgs& args, const Residual& residual) const {
  FloatEnvironment environment;
  const auto in = args.in;
  const auto writer = correcting(this->writer(args), residual, in.dtype, false);
  const auto write_as = [&]<class Real>(Real) {
    const auto* values = in_place<const Real>(in.dtype, in.data);
    for_each_piece(writer->pieces(), [&](std::size_t piece) {
      alignas(64) Real tile[kTile];
      for_tiles(writer->pieces(), piece, [&](std::size_t first, std::size_t n) {
        if (!values) load(in.dtype, in.part(first, n).data, n, tile);
        writer->write(first, n, values ? values + first : tile);
      });
    });
  };
  in.dtype == DType::kFloat64 ? write_as(double{}) : write_as(float{});
  return writer->finish();
}

}  // namespace cccl
