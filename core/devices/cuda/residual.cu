#include "devices/cuda/residual.h"

#include <algorithm>
#include <optional>
#include <type_traits>

#include "devices/cuda/codec.cuh"
#include "devices/cuda/residual.cuh"

namespace cccl::cuda {
namespace {

template <class Real>
inline constexpr int kVectorOf = kChunkBytes / sizeof(Real);

template <int kVector, class Tile>
__device__ inline void read_reals(const Tile& tile, const std::byte* array, DType dtype,
                                  float (&values)[kPerLane]) {
  read_floats<kVector>(tile, array, dtype, values);
}
template <int kVector, class Tile>
__device__ inline void read_reals(const Tile& tile, const std::byte* array, DType,
                                  double (&values)[kPerLane]) {
  read_values<double, true, kVector>(tile, array, values);
}

template <class Real>
__global__ void __launch_bounds__(kThreads, kResidentSums<Real>)
    correct_kernel(__grid_constant__ const Correction task, Span span, std::byte* to) {
  constexpr int kVector = kVectorOf<Real>;
  begin();
  const Residual residual = resolve(task.residual);
  for_tiles<kHasDirect<Real>>(span, [&](const auto& tile) {
    Real values[kPerLane];
    float kept[kPerLane];
    read_reals<kVector>(tile, task.values, task.dtype, values);
    load_residual<kVector>(residual, tile, kept);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values[i] = corrected(values[i], residual.decay, kept[i]);
    write_values<Real, false>(tile, to, values);
  });
}

// `task.values`: what the corrected values in `sent` decode to.
template <class Real>
__global__ void __launch_bounds__(kThreads, kResidentSums<Real>)
    keep_kernel(__grid_constant__ const Correction task, Span span, const std::byte* sent) {
  constexpr int kVector = kVectorOf<Real>;
  begin();
  const Residual residual = resolve(task.residual);
  bool spoiled = false;
  for_tiles<kHasDirect<Real>>(span, [&](const auto& tile) {
    Real decoded[kPerLane], values[kPerLane];
    float lost[kPerLane];
    read_reals<kVector>(tile, task.values, task.dtype, decoded);
    read_values<Real, true, kVector>(tile, sent, values);
    if constexpr (std::is_same_v<Real, float>) round_to(task.delivered, decoded);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      spoiled |= !isfinite(decoded[i]);
      lost[i] = static_cast<float>(values[i] - decoded[i]);
    }
    clear_behind<kVector>(tile, lost);
    store_residual<kVector>(residual, tile, lost);
  });
  if (spoiled && residual.spoiled) *residual.spoiled = 1;
}

// A codec whose values a residual corrects.
class Correcting final : public CudaCodec {
 public:
  Correcting(const Codec& codec, const Residual& residual, std::optional<DType> delivered)
      : CudaCodec(dynamic_cast<const CudaCodec&>(codec)),
        codec_(dynamic_cast<const CudaCodec&>(codec)),
        residual_(residual),
        delivered_(delivered) {}

  std::size_t encode(const EncodeArgs& args, Queue& queue) const override {
    return encode_sums(args.in, args, Sources{}, cuda_queue(queue));
  }

  std::size_t encode_sums(ConstValues values, const EncodeArgs& args, const Sources& sources,
                          const CudaQueue& on) const override {
    const CodecCall call(on.device().index);
    if (codec_.encode_corrected(values, args, sources, residual_, delivered_, on))
      return max_encoded_bytes(args.in.count, args.in.dtype);
    return values.dtype == DType::kFloat64 ? encode_in_parts<double>(values, args, sources, on)
                                           : encode_in_parts<float>(values, args, sources, on);
  }

  void decode(Bytes payload, Values out, Queue& queue) const override {
    codec_.decode(payload, out, queue);
  }
  void reduce(const ReduceArgs& args, Values out, Queue& queue) const override {
    codec_.reduce(args, out, queue);
  }
  std::size_t reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                            Queue& queue) const override {
    return codec_.reduce_encode(args, second, target, queue);
  }

 private:
  template <class Real>
  std::size_t encode_in_parts(ConstValues values, const EncodeArgs& args, const Sources& sources,
                              const CudaQueue& on) const {
    const auto count = values.count;
    const DType reals = std::is_same_v<Real, double> ? DType::kFloat64 : DType::kFloat32;
    const std::size_t bytes = (count * sizeof(Real) + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
    const Scratch scratch(2 * bytes, on);
    auto* const sent = static_cast<std::byte*>(scratch.data());
    Correction task{static_cast<const std::byte*>(values.data), values.dtype,
                    delivered_.value_or(DType::kFloat32), residual_};
    const bool aligned = is_aligned(residual_);
    launch(correct_kernel<Real>, on, tiles_of(count), 1, task,
           Span{count, 0, aligned && all_aligned(values.data)}, sent);
    const auto size = codec_.encode_sums({sent, count, reals}, args, sources, on);
    const auto decoded = codec_.decode_unrounded(args.out, sent + bytes, args.in, on);
    task.values = sent + bytes;
    task.dtype = decoded.dtype;
    launch(keep_kernel<Real>, on, tiles_of(count), 1, task, Span{count, 0, aligned}, sent);
    return size;
  }

  const CudaCodec& codec_;
  Residual residual_;
  std::optional<DType> delivered_;
};

// Many words to change in one launch.
constexpr int kMostWords = 256;
struct Words {
  std::uint32_t* at[kMostWords];
};

__global__ void swap_kernel(__grid_constant__ const Words words, int count,
                            const std::uint32_t* spoiled) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count && *spoiled == 0) *words.at[i] ^= 1;
}

__global__ void spoil_kernel(std::uint32_t* spoiled, const volatile std::uint32_t* flag,
                             const volatile Report* report) {
  bool bad = !flag || *flag != 0;
  for (int i = 0; i < kMostParts; ++i)
    bad |= (report[i].damaged | report[i].predicts_otherwise | report[i].non_finite) != 0;
  if (bad) *spoiled = 1;
}

}  // namespace

std::size_t encode_with_residual(const Codec& codec, const EncodeArgs& args,
                                 const Residual& residual, Queue& queue) {
  return Correcting(codec, residual, {}).encode(args, queue);
}

std::size_t reduce_encode_with_residual(const Codec& first, const ReduceArgs& args,
                                        const Codec& second, const EncodeArgs& target,
                                        const Residual& residual, Queue& queue) {
  return first.reduce_encode(args, Correcting(second, residual, target.in.dtype), target, queue);
}

void launch_swap(std::span<std::uint32_t* const> swapped, const std::uint32_t* spoiled,
                 cudaStream_t stream) {
  while (!swapped.empty()) {
    Words words{};
    const auto n = std::min<std::size_t>(swapped.size(), kMostWords);
    std::copy_n(swapped.begin(), n, words.at);
    swap_kernel<<<1, kMostWords, 0, stream>>>(words, static_cast<int>(n), spoiled);
    check(cudaGetLastError(), "a kernel launch");
    swapped = swapped.subspan(n);
  }
}

void launch_spoil(std::uint32_t* spoiled, const std::uint32_t* flag, const Report* report,
                  cudaStream_t stream) {
  spoil_kernel<<<1, 1, 0, stream>>>(spoiled, flag, report);
  check(cudaGetLastError(), "a kernel launch");
}

}  // namespace cccl::cuda
