#include "devices/cuda/noise.h"

#include "api/noise.h"
#include "devices/cuda/check.h"
#include "devices/cuda/finish.cuh"

namespace cccl::cuda {
namespace {

// A thread for each place of a piece, as the format adds them up.
template <class Real>
__global__ void __launch_bounds__(kNoisePiece)
    noise_kernel(const Real* values, std::uint64_t stride, int ranks, std::uint64_t count,
                 std::byte* payload) {
  __shared__ double variances[kNoisePiece], squares[kNoisePiece];
  __shared__ unsigned long long zeros;
  const unsigned int place = threadIdx.x;
  if (place == 0) zeros = 0;
  __syncthreads();
  double variance = 0, square = 0;
  unsigned long long found = 0;
  for (std::uint64_t at = place; at < count; at += kNoiseStride) {
    AcrossRanks across;
    across.begin(values[at]);
    for (int rank = 1; rank < ranks; ++rank) across.add(values[rank * stride + at]);
    const double mean = across.mean(ranks);
    variance += across.variance(ranks);
    square += mean * mean;
    found += mean == 0;
  }
  if (found) atomicAdd(&zeros, found);
  variances[place] = variance;
  squares[place] = square;
  __syncthreads();
  for (unsigned int half = kNoisePiece / 2; half > 0; half /= 2) {
    if (place < half) {
      variances[place] += variances[place + half];
      squares[place] += squares[place + half];
    }
    __syncthreads();
  }
  if (place != 0) return;
  const std::uint64_t looked_at = noise_values(count);
  const auto total = static_cast<double>(looked_at);
  PayloadHeader header = read_header(payload);
  header.statistics = pack_noise(static_cast<float>(sqrt(variances[0] / total)),
                                 static_cast<float>(sqrt(squares[0] / total)), zeros, looked_at);
  header.header_check = header_check(header);
  const auto bytes = std::bit_cast<std::array<std::byte, sizeof header>>(header);
  for (std::size_t i = 0; i < sizeof header; ++i) payload[i] = bytes[i];
}

template <class Real>
void launch_as(const void* values, std::size_t stride, std::size_t ranks, std::size_t count,
               std::byte* payload, const CudaQueue& queue) {
  noise_kernel<Real><<<1, kNoisePiece, 0, queue.stream()>>>(
      static_cast<const Real*>(values), stride, static_cast<int>(ranks), count, payload);
  check(cudaGetLastError(), "a kernel launch");
}

}  // namespace

void launch_noise(const void* values, DType reals, std::size_t stride, std::size_t ranks,
                  std::size_t count, std::byte* payload, const CudaQueue& queue) {
  if (count == 0) return;
  const auto launch = reals == DType::kFloat64 ? launch_as<double> : launch_as<float>;
  launch(values, stride, ranks, count, payload, queue);
}

}  // namespace cccl::cuda
