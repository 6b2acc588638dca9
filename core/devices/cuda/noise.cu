#include "devices/cuda/noise.h"

#include "devices/cuda/check.h"
#include "devices/cuda/finish.cuh"

namespace cccl::cuda {
namespace {

// A block for each window, a thread for each of its values.
template <class Real>
__global__ void __launch_bounds__(kNoisePiece)
    window_kernel(__grid_constant__ const NoiseTask task) {
  __shared__ double deviations[kNoisePiece], squares[kNoisePiece];
  const unsigned int place = threadIdx.x;
  const std::uint64_t at = blockIdx.x * kNoiseStride + place;
  bool zero = false;
  deviations[place] = squares[place] = 0;
  if (at < task.count) {
    const Real* const values = static_cast<const Real*>(task.values) + at;
    const auto ranks = static_cast<double>(task.ranks);
    AcrossRanks across;
    across.begin(values[0]);
    for (std::size_t rank = 1; rank < task.ranks; ++rank) across.add(values[rank * task.stride]);
    const double mean = across.mean(ranks);
    deviations[place] = across.deviations(ranks);
    squares[place] = mean * mean;
    zero = mean == 0;
  }
  const int zeros = __syncthreads_count(zero);
  for (unsigned int half = kNoisePiece / 2; half > 0; half /= 2) {
    if (place < half) {
      deviations[place] += deviations[place + half];
      squares[place] += squares[place + half];
    }
    __syncthreads();
  }
  if (place == 0)
    task.windows[blockIdx.x] = {deviations[0], squares[0], static_cast<std::uint64_t>(zeros)};
}

__global__ void seal_kernel(__grid_constant__ const NoiseTask task) {
  NoiseWindow all;
  for (std::size_t i = 0; i < noise_windows(task.count); ++i) all.add(task.windows[i]);
  const std::size_t looked_at = noise_values(task.count);
  const double of_ranks = noise_divisor(task.count, static_cast<double>(task.ranks));
  PayloadHeader header = read_header(task.payload);
  header.statistics = pack_noise(
      static_cast<float>(sqrt(all.deviations / of_ranks)),
      static_cast<float>(sqrt(all.squares / static_cast<double>(looked_at))), all.zeros, looked_at);
  header.header_check = header_check(header);
  const auto bytes = std::bit_cast<std::array<std::byte, sizeof header>>(header);
  for (std::size_t i = 0; i < sizeof header; ++i) task.payload[i] = bytes[i];
}

}  // namespace

void launch_noise(const NoiseTask& task, const CudaQueue& queue) {
  if (task.count == 0) return;
  const auto windows = static_cast<unsigned int>(noise_windows(task.count));
  if (task.reals == DType::kFloat64)
    window_kernel<double><<<windows, kNoisePiece, 0, queue.stream()>>>(task);
  else
    window_kernel<float><<<windows, kNoisePiece, 0, queue.stream()>>>(task);
  check(cudaGetLastError(), "a kernel launch");
  seal_kernel<<<1, 1, 0, queue.stream()>>>(task);
  check(cudaGetLastError(), "a kernel launch");
}

}  // namespace cccl::cuda
