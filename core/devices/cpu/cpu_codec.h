// What codecs on the CPU share: their headers, and sums passed from one to the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "api/codec.h"
#include "api/residual.h"
#include "devices/cpu/workers.h"

namespace cccl {

// A tile of floats and its codes stay in the first-level cache. A multiple of every block size.
inline constexpr std::size_t kTile = 2048;

// use(first, n) for each tile of a piece.
template <class Use>
void for_tiles(const Pieces& pieces, std::size_t piece, Use use) {
  const std::size_t end = pieces.end(piece);
  for (std::size_t first = pieces.begin(piece); first < end; first += kTile)
    use(first, std::min(kTile, end - first));
}

// `memory` where it can be used as it is: values of that very type, aligned. Else null.
template <class Real, class Memory>
Real* in_place(DType dtype, Memory* memory) {
  const bool same = dtype == (sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32);
  const bool aligned = reinterpret_cast<std::uintptr_t>(memory) % alignof(Real) == 0;
  return same && aligned ? static_cast<Real*>(memory) : nullptr;
}

// Writes a payload, a tile of at most kTile values after the other.
class PayloadWriter {
 public:
  virtual ~PayloadWriter() = default;
  // Of all its values: each piece is written in order, by a thread of its own.
  virtual const Pieces& pieces() const = 0;
  // Values from `first` on, in the accumulator's type: not rounded to their dtype yet.
  virtual void write(std::size_t first, std::size_t n, const float* values) = 0;
  virtual void write(std::size_t first, std::size_t n, const double* values) = 0;
  // What the values written last decode to; these very ones. For codecs that lose something.
  virtual void written(std::size_t first, std::size_t n, float* values);
  virtual void written(std::size_t first, std::size_t n, double* values);
  virtual std::size_t finish() = 0;  // completes it with its header; its size
};

class NoiseSample;

class CpuCodec : public Codec {
 public:
  explicit CpuCodec(CodecInfo info) : info_(std::move(info)) {}

  const CodecInfo& info() const final { return info_; }
  bool supports(DType dtype) const override { return is_floating(dtype); }
  std::size_t reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                            Queue&) const final {
    return reduce_encode(args, second, target, nullptr);
  }

  // encode() and reduce_encode() of values that a residual corrects, which then keeps what is lost.
  std::size_t encode(const EncodeArgs& args, const Residual& residual) const;
  std::size_t reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                            const Residual* residual) const;
  using Codec::encode;

  // The header of a payload of these values, but for what the values decide. Throws if they cannot
  // be encoded.
  PayloadHeader header_for(const EncodeArgs& args) const;
  virtual void write_params(std::uint8_t (&)[4]) const {}

  // Of a payload of values like args.in, whose memory is not looked at.
  virtual std::unique_ptr<PayloadWriter> writer(const EncodeArgs& args) const = 0;

 protected:
  template <class Real>
  using Consume = std::function<void(std::size_t first, std::size_t n, const Real* total)>;

  // Whether decoding needs the seed, which the header then holds.
  virtual bool keeps_seed() const { return false; }

  // How many bytes a body with this header has. Throws CorruptPayloadError.
  virtual std::size_t expected_bytes(const PayloadHeader& header, Bytes payload) const = 0;

  // The mean of payloads with these headers, tile by tile, each piece in order. Has checked the
  // bodies' checksums when it returns.
  virtual void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                   const Pieces& pieces, DType dtype, const Consume<float>& consume) const = 0;
  virtual void sum(const ReduceArgs& args, std::span<const PayloadHeader> headers,
                   const Pieces& pieces, DType dtype, const Consume<double>& consume) const = 0;

  // The same; what it decodes is looked at. Throws UnsupportedError where it cannot be.
  virtual void sum_measured(const ReduceArgs&, std::span<const PayloadHeader>, const Pieces&, DType,
                            const Consume<float>&, NoiseSample&) const {
    refuse_to_measure();
  }
  virtual void sum_measured(const ReduceArgs&, std::span<const PayloadHeader>, const Pieces&, DType,
                            const Consume<double>&, NoiseSample&) const {
    refuse_to_measure();
  }

  // The header, after checks that this very codec made it, of values like these.
  PayloadHeader open(Bytes payload, std::size_t count, DType dtype,
                     bool with_checksum = true) const;

 private:
  [[noreturn]] void refuse_to_measure() const;

  CodecInfo info_;
};

}  // namespace cccl
