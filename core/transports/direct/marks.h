// Numbers in GPU memory by which ranks tell each other how far they are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cccl::direct {

struct Mark {
  std::uint64_t* at;
  std::uint64_t value;  // above the base; marks only grow
};
inline constexpr int kMostMarks = 64;
struct Marks {
  std::uint64_t* base;  // in memory of this GPU, so that a graph's replays go on from the last
  std::uint64_t advance = 0;  // of the base, before it counts
  int count = 0;
  Mark marks[kMostMarks];
};

// Sets marks of any GPU, once all memory that earlier work in the stream wrote can be read there;
// later work waits until the others have reached their values. Does nothing more once `given_up`,
// in host memory, is not 0: what a rank that gave up has is no longer worth reading.
void launch(const Marks& to_set, const Marks& to_await, const std::uint32_t* given_up, int device,
            cudaStream_t stream);

}  // namespace cccl::direct
