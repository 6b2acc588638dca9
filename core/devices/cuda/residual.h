// Platform::encode() and reduce_encode() with a residual, on CUDA devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "api/codec.h"
#include "api/residual.h"
#include "devices/cuda/queue.h"

namespace cccl::cuda {

std::size_t encode_with_residual(const Codec& codec, const EncodeArgs& args,
                                 const Residual& residual, Queue& queue);
std::size_t reduce_encode_with_residual(const Codec& first, const ReduceArgs& args,
                                        const Codec& second, const EncodeArgs& target,
                                        const Residual& residual, Queue& queue);

// Platform::swap() and spoil().
void launch_swap(std::span<std::uint32_t* const> swapped, const std::uint32_t* spoiled,
                 cudaStream_t stream);
void launch_spoil(std::uint32_t* spoiled, const std::uint32_t* flag, const Report* report,
                  cudaStream_t stream);

}  // namespace cccl::cuda
