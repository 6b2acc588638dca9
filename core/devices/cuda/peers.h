// Memory of other GPUs that kernels here read. To prefetch it is slow beyond measure: 6 GB/s
// instead of 350 over NVLink, where what is fetched does not stay in this GPU's cache.
#pragma once

#include <cstddef>

namespace cccl::cuda {

void add_peer_memory(const std::byte* begin, std::size_t bytes);
void remove_peer_memory(const std::byte* begin);
bool is_peer_memory(const std::byte* at);

}  // namespace cccl::cuda
