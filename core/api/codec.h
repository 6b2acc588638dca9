// A codec turns a span of values into a payload (header + body) and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "api/buffer.h"
#include "api/device.h"
#include "api/payload.h"

namespace cccl {

struct CodecInfo {
  std::uint8_t id;  // on the wire; never reused
  const char* name;
  std::vector<std::string> aliases;
  bool lossless;
  bool fixed_size;        // encoded bytes depend on count and dtype alone
  bool predicts = false;  // uses a prediction, where it is given one
};

// What the values of a tensor may be like: known alike, to the last bit, to all who read its
// payloads. All finite. Number 0: there is none.
struct Prediction {
  ConstValues values;
  std::uint64_t number = 0;
};

struct EncodeArgs {
  ConstValues in;
  std::uint64_t position = 0;           // of in[0] in the whole tensor: keys stochastic rounding
  std::uint64_t seed = 0;               // of stochastic rounding
  const std::uint64_t* runs = nullptr;  // in the device's memory, or none: changes the seed
  bool checksum = true;
  std::uint32_t origin = 0;  // PayloadHeader::origin to pass on
  MutableBytes out;          // at least max_encoded_bytes(in.count, in.dtype)
};

struct DecodeArgs {
  Bytes payload;
  Values out;
};

// Payloads of the same values from several ranks, summed in the order given.
struct ReduceArgs {
  std::span<const Bytes> payloads;
  double divisor = 1;     // the sum is divided by it, once
  bool measures = false;  // reduce_encode() puts statistics into the header (api/noise.h)
};

class Codec {
 public:
  virtual ~Codec() = default;

  virtual const CodecInfo& info() const = 0;

  // Name and all options in canonical form: equal specs make equal bytes of equal values.
  virtual std::string spec() const = 0;

  // Cutting a tensor at multiples of this many values changes no code.
  virtual std::size_t granularity() const = 0;

  virtual bool supports(DType dtype) const = 0;

  // Upper bound of a payload of n values, header included; encode() never writes more.
  virtual std::size_t max_encoded_bytes(std::size_t n, DType dtype) const = 0;

  // Guaranteed bound of |decode(encode(x))[i] - x[i]| per value, for finite x.
  virtual void error_bound(ConstValues in, std::span<double> bound) const = 0;

  // The same codec with a prediction of the whole tensor, which must outlive it, for codecs that
  // use one. A payload that needs it is refused by a codec with another, or with none.
  virtual std::shared_ptr<const Codec> with_prediction(const Prediction&) const { return nullptr; }

  // Returns the payload's size. On a device, where values decide it, the most that it may be: the
  // header will have it. Input may have any alignment; non-finite input is legal.
  virtual std::size_t encode(const EncodeArgs& args, Queue& queue) const = 0;

  // `out` must have the payload's count and dtype. Throws CorruptPayloadError.
  virtual void decode(Bytes payload, Values out, Queue& queue) const = 0;

  // Several payloads of one collective: together, where each call has a price of its own.
  virtual void encode_all(std::span<const EncodeArgs> parts, Queue& queue) const {
    for (const auto& args : parts) encode(args, queue);
  }
  virtual void decode_all(std::span<const DecodeArgs> parts, Queue& queue) const {
    for (const auto& [payload, out] : parts) decode(payload, out, queue);
  }

  // out = sum(payloads) / divisor, accumulated in fp32 (fp64 for float64) and rounded once.
  virtual void reduce(const ReduceArgs& args, Values out, Queue& queue) const = 0;

  // The same, encoded by `second` without a pass through memory. `target.in` names count and
  // dtype only. Returns what encode() does.
  virtual std::size_t reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                                    Queue& queue) const = 0;
};

using OptionValue = std::variant<bool, std::int64_t, double, std::string>;
using Options = std::map<std::string, OptionValue>;

// Hands options to a codec one by one, so that what it did not ask for is refused by name.
class OptionReader {
 public:
  OptionReader(std::string codec, Options options)
      : codec_(std::move(codec)), options_(std::move(options)) {}

  std::int64_t integer(const std::string& key, std::int64_t fallback);
  double number(const std::string& key, double fallback);
  std::string choice(const std::string& key, std::span<const std::string_view> allowed);
  // The codec that `key` names, made of all options that were not asked for yet.
  std::shared_ptr<const Codec> inner(const std::string& key, const std::string& fallback);
  bool given(const std::string& key) const { return options_.contains(key); }

  [[noreturn]] void refuse(const std::string& key, const std::string& allowed) const;
  void finish() const;  // throws ConfigError if an option was not asked for

 private:
  const OptionValue* take(const std::string& key);

  std::string codec_;
  Options options_;
  std::set<std::string> known_;
};

// One row of the registry. `make` builds from options, `reopen` from a payload's header.
struct CodecEntry {
  CodecInfo info;
  std::unique_ptr<Codec> (*make)(const CodecInfo&, OptionReader&);
  std::unique_ptr<Codec> (*reopen)(const CodecInfo&, const PayloadHeader&);
};

std::vector<const CodecEntry*> registered_codecs();

// By name or alias; "outer(inner)" sets the outer codec's option `inner`. Throws ConfigError.
std::shared_ptr<const Codec> make_codec(const std::string& name, const Options& options = {});

// The same codec for arrays on a device of that kind. Throws UnsupportedError where there is none.
std::shared_ptr<const Codec> codec_on(DeviceKind kind, std::shared_ptr<const Codec> codec);

// The codec that decodes a payload with this header. Throws CorruptPayloadError.
std::shared_ptr<const Codec> codec_of(const PayloadHeader& header);

}  // namespace cccl
