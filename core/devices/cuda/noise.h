// Statistics of a reduction (api/noise.h) on CUDA devices.
#pragma once

#include <cstddef>

#include "api/dtype.h"
#include "api/noise.h"
#include "devices/cuda/queue.h"

namespace cccl::cuda {

// Contributions to a payload, decoded as float32 or float64: `count` values of each rank, `stride`
// from one rank's to the next one's.
struct NoiseTask {
  const void* values;
  DType reals;
  std::size_t stride, ranks, count;
  NoiseWindow* windows;  // room for noise_windows(count)
  std::byte* payload;
};

// Puts statistics into the payload's header, which is sealed anew.
void launch_noise(const NoiseTask& task, const CudaQueue& queue);

}  // namespace cccl::cuda
