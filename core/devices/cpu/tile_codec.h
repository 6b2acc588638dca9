// A codec that works tile by tile on the CPU. All else (dtypes, headers, reductions) is here once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "devices/cpu/cpu_codec.h"

namespace cccl {

// Values [first, first + n) of a payload of `count`: where a tile lies and how it is rounded.
struct Tile {
  std::byte* body;  // of the whole payload; const when decoding
  DType dtype;
  std::size_t count, first, n;
  std::uint64_t position = 0;  // of value `first` in the whole tensor
  std::uint64_t seed = 0;      // when decoding, the header's
};

class TileCodec : public CpuCodec {
 public:
  using CpuCodec::CpuCodec;

  std::size_t max_encoded_bytes(std::size_t n, DType dtype) const final {
    return sizeof(PayloadHeader) + body_bytes(n, dtype);
  }

  std::size_t encode(const EncodeArgs& args, Queue& queue) const override;
  void decode(Bytes payload, Values out, Queue& queue) const override;
  void reduce(const ReduceArgs& args, Values out, Queue& queue) const override;
  std::unique_ptr<PayloadWriter> writer(const EncodeArgs& args) const final;

  virtual std::size_t body_bytes(std::size_t n, DType dtype) const = 0;

  // Whether another codec may put its bodies into payloads of its own.
  virtual bool may_be_inner() const { return true; }

  // Tiles begin at multiples of granularity(), and have at most kTile values; those of a payload
  // may be on several threads. Encoding tells whether a value decodes to Inf or NaN.
  virtual bool encode_tile(const Tile& tile, const float* values) const = 0;
  virtual void decode_tile(const Tile& tile, float* values) const = 0;
  virtual void add_tile(const Tile& tile, float* total) const;  // total += decoded

  // float64, unless the codec keeps more than a float's digits.
  virtual bool encode_tile(const Tile& tile, const double* values) const;
  virtual void decode_tile(const Tile& tile, double* values) const;
  virtual void add_tile(const Tile& tile, double* total) const;

 protected:
  // How much of the body's start is of its first n values alone: the checksum takes it while it is
  // in the cache.
  virtual std::size_t settled_bytes(std::size_t, DType) const { return 0; }

  std::size_t expected_bytes(const PayloadHeader& header, Bytes) const final {
    return body_bytes(header.count, DType{header.dtype});
  }
  void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers, const Pieces& pieces,
           DType dtype, const Consume<float>& consume) const final;
  void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers, const Pieces& pieces,
           DType dtype, const Consume<double>& consume) const final;
  void sum_measured(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                    const Pieces& pieces, DType dtype, const Consume<float>& consume,
                    NoiseSample& noise) const final;
  void sum_measured(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                    const Pieces& pieces, DType dtype, const Consume<double>& consume,
                    NoiseSample& noise) const final;

 private:
  class Writer;

  template <class Real>
  std::size_t encode_as(const EncodeArgs& args) const;
  template <class Real>
  void decode_as(Bytes payload, std::uint64_t seed, Values out) const;
  template <class Real, class Arrive, class Use>
  void reduce_as(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                 const Pieces& pieces, DType dtype, Real* values, Arrive arrive, Use use,
                 NoiseSample* noise = nullptr) const;
  template <class Real>
  void reduce_into(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                   Values out) const;
  template <class Real>
  void sum_as(const ReduceArgs& args, std::span<const PayloadHeader> headers, const Pieces& pieces,
              DType dtype, const Consume<Real>& consume, NoiseSample* noise = nullptr) const;
};

// The codec within a payload of `outer`: its number is the last of the header's params, which the
// inner codec itself leaves 0. Null where there is none of that number that codes tiles.
std::shared_ptr<const TileCodec> inner_of(const PayloadHeader& header, const CodecInfo& outer);

}  // namespace cccl
