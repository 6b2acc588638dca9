// A codec that works tile by tile on the CPU. All else (dtypes, headers, reductions) is here once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "api/codec.h"

namespace cccl {

// A tile of floats and its codes stay in the first-level cache. A multiple of every block size.
inline constexpr std::size_t kTile = 2048;

// Values [first, first + n) of a payload of `count`: where a tile lies and how it is rounded.
struct Tile {
  std::byte* body;  // of the whole payload; const when decoding
  DType dtype;
  std::size_t count, first, n;
  std::uint64_t position = 0;  // of value `first` in the whole tensor
  std::uint64_t seed = 0;      // when decoding, the header's
};

class TileCodec : public Codec {
 public:
  explicit TileCodec(CodecInfo info) : info_(std::move(info)) {}

  const CodecInfo& info() const final { return info_; }
  bool supports(DType dtype) const override { return is_floating(dtype); }
  std::size_t max_encoded_bytes(std::size_t n, DType dtype) const final {
    return sizeof(PayloadHeader) + body_bytes(n, dtype);
  }

  std::size_t encode(const EncodeArgs& args, Queue& queue) const override;
  void decode(Bytes payload, Values out, Queue& queue) const override;
  void reduce(const ReduceArgs& args, Values out, Queue& queue) const override;
  std::size_t reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                            Queue& queue) const override;

  // The header of a payload of these values, but for what the values decide. Throws if they cannot
  // be encoded.
  PayloadHeader header_for(const EncodeArgs& args) const;

 protected:
  virtual std::size_t body_bytes(std::size_t n, DType dtype) const = 0;
  virtual void write_params(std::uint8_t (&)[4]) const {}
  // Whether decoding needs the seed, which the header then holds.
  virtual bool keeps_seed() const { return false; }

  // How much of the body's start is final once its first n values are encoded: the checksum takes
  // it while it is in the cache.
  virtual std::size_t settled_bytes(std::size_t, DType) const { return 0; }

  // Tiles begin at multiples of granularity(), and have at most kTile values. Encoding tells
  // whether a value decodes to Inf or NaN.
  virtual bool encode_tile(const Tile& tile, const float* values) const = 0;
  virtual void decode_tile(const Tile& tile, float* values) const = 0;
  virtual void add_tile(const Tile& tile, float* total) const;  // total += decoded

  // float64, unless the codec keeps more than a float's digits.
  virtual bool encode_tile(const Tile& tile, const double* values) const;
  virtual void decode_tile(const Tile& tile, double* values) const;
  virtual void add_tile(const Tile& tile, double* total) const;

  // The header, after checks that this very codec made it, of values like `out`.
  PayloadHeader open(Bytes payload, std::size_t count, DType dtype,
                     bool with_checksum = true) const;

 private:
  template <class Real>
  std::size_t encode_as(const EncodeArgs& args) const;
  template <class Real>
  void decode_as(Bytes payload, std::uint64_t seed, Values out) const;
  template <class Real, class Arrive, class Consume>
  void reduce_as(const ReduceArgs& args, std::span<const PayloadHeader> headers, std::size_t count,
                 DType dtype, Real* values, Arrive arrive, Consume consume) const;
  template <class Real>
  void reduce_into(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                   Values out) const;
  template <class Real>
  void reduce_encode_as(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                        const TileCodec& second, const EncodeArgs& target,
                        PayloadHeader header) const;

  CodecInfo info_;
};

}  // namespace cccl
