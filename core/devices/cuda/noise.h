// Statistics of a reduction (api/noise.h) on CUDA devices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api/dtype.h"
#include "devices/cuda/queue.h"

namespace cccl::cuda {

// Puts them into the header of `payload`, which is sealed anew. `values`: decoded contributions as
// `reals`, float32 or float64, `count` of each rank, `stride` from one rank's to the next one's.
void launch_noise(const void* values, DType reals, std::size_t stride, std::size_t ranks,
                  std::size_t count, std::byte* payload, const CudaQueue& queue);

}  // namespace cccl::cuda
