// What every codec on CUDA devices is, how its kernels are launched, and the memory of its calls.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "api/codec.h"
#include "devices/cpu/cpu_codec.h"
#include "devices/cuda/cells.cuh"
#include "devices/cuda/check.h"
#include "devices/cuda/kernels.cuh"
#include "devices/cuda/launch.cuh"
#include "devices/cuda/noise.h"
#include "devices/cuda/peers.h"
#include "devices/cuda/queue.h"
#include "devices/cuda/residual.cuh"

namespace cccl::cuda {

// As many blocks as the device runs at once, if there is work for them, which `parts` share evenly.
// `memory`: bytes of dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch_with(std::size_t memory, void (*kernel)(Parameters...), const CudaQueue& queue,
                 std::uint64_t tiles, std::size_t parts, const Arguments&... arguments) {
  const int device = queue.device().index;
  const std::uint64_t wanted = (tiles + kWarps - 1) / kWarps;
  const auto most =
      resident_blocks(reinterpret_cast<const void*>(kernel), kThreads, memory, device);
  cudaLaunchConfig_t config{};
  const auto each = std::clamp<std::uint64_t>(wanted, 1, std::max<std::uint64_t>(1, most / parts));
  config.gridDim = {static_cast<unsigned int>(each), static_cast<unsigned int>(parts), 1};
  config.blockDim = kThreads;
  config.dynamicSmemBytes = memory;
  config.stream = queue.stream();
  launch_early(config, device, kernel, arguments...);
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const CudaQueue& queue, std::uint64_t tiles,
            std::size_t parts, const Arguments&... arguments) {
  launch_with(0, kernel, queue, tiles, parts, arguments...);
}

// Memory of one call, in the order of its queue.
class Scratch {
 public:
  Scratch(std::size_t bytes, const CudaQueue& queue) : stream_(queue.stream()) {
    CCCLIB_CUDA(cudaMallocAsync, &memory_, std::max<std::size_t>(bytes, 1), stream_);
  }
  ~Scratch() { cudaFreeAsync(memory_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return memory_; }

 private:
  void* memory_ = nullptr;
  cudaStream_t stream_;
};

template <class... Pointers>
bool all_aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % kChunkBytes == 0) && ...);
}

inline std::uint64_t tiles_of(std::uint64_t count) {
  return (count + kTileValues - 1) / kTileValues;
}

// In which values of a dtype are added up.
inline DType sums_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

inline Mean mean_of(double divisor, DType dtype) {
  int exponent;
  const auto single = static_cast<float>(divisor);
  const float reciprocal = 1.0f / single;
  const bool exact = std::abs(std::frexp(single, &exponent)) == 0.5f && std::isnormal(reciprocal);
  const bool moderate = std::abs(std::ilogb(single)) < 40;
  return {divisor, single, reciprocal, exact, moderate, dtype == DType::kFloat16};
}

// use(run) for each run of parts that a launch may have together.
template <class Part, class Key, class Use>
void for_alike(std::span<const Part> parts, Key key, Use use) {
  while (!parts.empty()) {
    std::size_t n = 1;
    while (n < parts.size() && n < kMostParts && key(parts[n]) == key(parts[0])) ++n;
    use(parts.first(n));
    parts = parts.subspan(n);
  }
}

// What one CUDA codec asks of another.
class CudaCodec : public Codec {
 public:
  explicit CudaCodec(std::shared_ptr<const Codec> reference)
      : reference_(std::move(reference)), on_cpu_(&dynamic_cast<const CpuCodec&>(*reference_)) {}

  const CodecInfo& info() const final { return reference_->info(); }
  std::string spec() const final { return reference_->spec(); }
  std::size_t granularity() const final { return reference_->granularity(); }
  bool supports(DType dtype) const final { return reference_->supports(dtype); }
  std::size_t max_encoded_bytes(std::size_t n, DType dtype) const final {
    return reference_->max_encoded_bytes(n, dtype);
  }
  void error_bound(ConstValues in, std::span<double> bound) const final {
    reference_->error_bound(in, bound);
  }

  // Encodes `values`, which are sums of the sources in their own type, as values of args.in.
  virtual std::size_t encode_sums(ConstValues values, const EncodeArgs& args,
                                  const Sources& sources, const CudaQueue& queue) const = 0;

  // Encodes like encode_sums(), corrected by a residual, which keeps what is lost; false where
  // there is no kernel for it. `delivered`: Correction::delivered.
  virtual bool encode_corrected(ConstValues, const EncodeArgs&, const Sources&, const Residual&,
                                std::optional<DType>, const CudaQueue&) const {
    return false;
  }
  // Values like `like` of a payload of this rank, as floats or doubles where that rounds less.
  virtual Values decode_unrounded(Bytes, void*, ConstValues, const CudaQueue&) const {
    throw Error("a codec that loses nothing leaves no residual");
  }
  // The same of several payloads, `stride` bytes from one's values to the next one's.
  virtual void decode_all_unrounded(std::span<const Bytes> payloads, std::byte* memory,
                                    std::size_t stride, ConstValues like,
                                    const CudaQueue& on) const {
    for (std::size_t i = 0; i < payloads.size(); ++i)
      decode_unrounded(payloads[i], memory + i * stride, like, on);
  }

  // Cells of this codec within another's payload: the length of their bodies, and what writes them
  // and completes the payload, or reads them. Throw UnsupportedError where there is no code for it.
  virtual BodySize body_size(DType) const { refuse_cells(); }
  virtual void encode_cells(const CellsToEncode&, const EncodeArgs&, const Seal&, const Sources&,
                            const CudaQueue&) const {
    refuse_cells();
  }
  virtual void decode_cells(const CellsToDecode&, DType, const Sources&, const CudaQueue&) const {
    refuse_cells();
  }

 protected:
  Seal seal_of(const EncodeArgs& args) const {
    return {args.out.data(), on_cpu_->header_for(args), args.checksum};
  }

  // Throws CorruptPayloadError for lengths that no payload of these values has. Where sizes depend
  // on the values, the least of the payloads' lengths is the most that a body may have.
  Sources sources_of(std::span<const Bytes> payloads, std::size_t count, DType dtype) const {
    if (payloads.empty() || payloads.size() > kMaxSources)
      throw UnsupportedError("a CUDA reduction takes 1 to " + std::to_string(kMaxSources) +
                             " payloads, got " + std::to_string(payloads.size()));
    Sources sources{};
    const auto most = max_encoded_bytes(count, dtype);
    const auto least = info().fixed_size ? most : sizeof(PayloadHeader);
    auto body = most - sizeof(PayloadHeader);
    for (const Bytes payload : payloads) {
      if (payload.size() < least)
        throw CorruptPayloadError("payload truncated: " + std::to_string(payload.size()) +
                                  " bytes instead of " + std::to_string(least));
      body = std::min(body, payload.size() - sizeof(PayloadHeader));
      sources.payloads[sources.count++] = payload.data();
    }
    EncodeArgs like;
    like.in = {nullptr, count, dtype};
    like.out = {static_cast<std::byte*>(nullptr), most};
    sources.expected = on_cpu_->header_for(like);
    sources.expected.body_bytes = body;
    sources.any_size = !info().fixed_size;
    return sources;
  }

  // `units` are what tiles are made of.
  Parts<EncodePart> encode_parts(std::span<const EncodeArgs> args, std::uint64_t units) const {
    Parts<EncodePart> parts{};
    for (std::size_t i = 0; i < args.size(); ++i) {
      const auto* const from = static_cast<const std::byte*>(args[i].in.data);
      const bool aligned = all_aligned(from, args[i].out.data());
      parts.parts[i] = {from, {units, args[i].position, aligned}, seal_of(args[i])};
    }
    return parts;
  }
  Parts<DecodePart> decode_parts(std::span<const DecodeArgs> args, std::uint64_t units) const {
    Parts<DecodePart> parts{};
    for (std::size_t i = 0; i < args.size(); ++i) {
      const auto& [payload, out] = args[i];
      const auto expected = sources_of({&payload, 1}, out.count, out.dtype).expected;
      const bool aligned = all_aligned(payload.data(), out.data);
      parts.parts[i] = {static_cast<std::byte*>(out.data),
                        {units, 0, aligned},
                        payload.data(),
                        expected,
                        !is_peer_memory(payload.data())};
    }
    return parts;
  }

 private:
  [[noreturn]] void refuse_cells() const {
    throw UnsupportedError("codec '" + spec() + "' is not within others on CUDA devices");
  }

  std::shared_ptr<const Codec> reference_;
  const CpuCodec* on_cpu_;
};

// A codec with kernels that add its payloads up.
class SummingCodec : public CudaCodec {
 public:
  using CudaCodec::CudaCodec;

  void reduce(const ReduceArgs& args, Values out, Queue& queue) const final {
    const auto& on = cuda_queue(queue);
    const CodecCall call(on.device().index);
    reduce_as(args, out, out.dtype, on);
  }

  std::size_t reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                            Queue& queue) const final {
    const auto* to = dynamic_cast<const CudaCodec*>(&second);
    if (!to)
      throw UnsupportedError("codec '" + second.spec() + "' cannot encode sums on a CUDA device");
    const auto& on = cuda_queue(queue);
    const CodecCall call(on.device().index);
    if (args.measures && (info().lossless || !info().fixed_size))
      throw UnsupportedError("codec '" + spec() +
                             "' cannot measure the noise between ranks on a CUDA device: send "
                             "measured steps as a lossy codec of fixed size, such as block_float8");
    const auto size = sum_and_encode(args, *to, target, on);
    if (args.measures) measure_noise(args, target, on);
    return size;
  }

 private:
  std::size_t sum_and_encode(const ReduceArgs& args, const CudaCodec& to, const EncodeArgs& target,
                             const CudaQueue& on) const {
    if (const auto size = reduce_encode_at_once(args, to, target, on)) return *size;
    // Codecs of different kinds, doubles, and what is costly to encode, meet in memory.
    const auto [_, count, dtype] = target.in;
    const DType sums = sums_of(dtype);
    const Scratch scratch(count * size_of(sums), on);
    const auto sources = reduce_as(args, {scratch.data(), count, sums}, dtype, on);
    return to.encode_sums({scratch.data(), count, sums}, target, sources, on);
  }

  // Decodes the contributions once more: rare enough not to burden the kernels that add them up.
  void measure_noise(const ReduceArgs& args, const EncodeArgs& target, const CudaQueue& on) const {
    const auto [_, count, dtype] = target.in;
    const DType reals = sums_of(dtype);
    const std::size_t ranks = args.payloads.size();
    const std::size_t stride = (count + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
    const std::size_t bytes = stride * size_of(reals);
    const Scratch scratch(ranks * bytes + noise_windows(count) * sizeof(NoiseWindow), on);
    auto* const values = static_cast<std::byte*>(scratch.data());
    for (std::size_t rank = 0; rank < ranks; ++rank)
      decode_unrounded(args.payloads[rank], values + rank * bytes, target.in, on);
    auto* const windows = reinterpret_cast<NoiseWindow*>(values + ranks * bytes);
    launch_noise({values, reals, stride, ranks, count, windows, target.out.data()}, on);
  }

  // Sums as `dtype` wants them, rounded to the type of `out`.
  virtual Sources reduce_as(const ReduceArgs& args, Values out, DType dtype,
                            const CudaQueue& on) const = 0;

  // By one kernel, where there is one: the payload's size.
  virtual std::optional<std::size_t> reduce_encode_at_once(const ReduceArgs&, const CudaCodec&,
                                                           const EncodeArgs&,
                                                           const CudaQueue&) const {
    return std::nullopt;
  }
};

}  // namespace cccl::cuda
