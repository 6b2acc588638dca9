// Small kernels beside the codecs'.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "api/buffer.h"
#include "devices/cuda/queue.h"

namespace cccl::cuda {

// Makes an output NaN: if `flag` is null or raised, or `report` has damage, when the stream comes
// to it.
void launch_fill_nan(Values out, const std::uint32_t* flag, const Report* report,
                     cudaStream_t stream);

// Copies values of a floating-point type to others at an aligned address, with 0 for Inf and NaN.
void launch_copy_finite(ConstValues from, Values to, cudaStream_t stream);

// Copies the 64-bit number at each place, aligned to its size, to host memory.
inline constexpr int kMostNumbers = 128;
void launch_read(std::span<const std::byte* const> places, std::uint64_t* to, cudaStream_t stream);

// Adds 1.
void launch_count(std::uint64_t* counter, cudaStream_t stream);

// Whether this build has code for the current device.
cudaError_t find_code();

}  // namespace cccl::cuda
