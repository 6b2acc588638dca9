// Where what thread blocks make in parallel begins if it lies side by side: each publishes how long
// its own part is, and sums up what those in front have published (decoupled look-back, Merrill and
// Garland). One pass.
#pragma once

#include <cstdint>

#include "devices/cuda/finish.cuh"

namespace cccl::cuda {

// How far sizes are known: a value, and what it is.
enum Known : std::uint64_t { kNothing = 0, kOwn = 1, kSumSoFar = 2 };

// What is known of a part before the sum of all in front of it is. That of the first is its sum.
__device__ inline void publish(volatile unsigned long long* known, std::uint64_t part,
                               std::uint64_t size) {
  if (part > 0) known[part] = size << 2 | kOwn;
}

// The sizes of all parts in front of this one, for one warp; the others' are published as they
// become known. Parts are taken in order, so that none waits for one that nobody has. kWide: how
// many sizes a lane looks at together.
template <int kWide = 1>
__device__ inline std::uint64_t sum_before(volatile unsigned long long* known, std::uint64_t part,
                                           std::uint64_t size) {
  if (part == 0) {
    if (lane_id() == 0) known[0] = size << 2 | kSumSoFar;
    return 0;
  }
  std::uint64_t sum = 0;
  for (std::int64_t last = static_cast<std::int64_t>(part) - 1;; last -= kWide * kLanes) {
    std::uint64_t of_lane;
    bool missing, done;
    do {  // until all up to the nearest sum, or all, are known
      std::uint64_t found[kWide];
#pragma unroll
      for (int w = 0; w < kWide; ++w) {
        const std::int64_t at = last - w * kLanes - lane_id();
        found[w] = at >= 0 ? known[at] : kSumSoFar;
      }
      of_lane = 0;
      missing = done = false;
#pragma unroll
      for (int w = 0; w < kWide; ++w) {
        const unsigned int sums = __ballot_sync(~0u, (found[w] & 3) == kSumSoFar);
        const unsigned int up_to = sums ? sums ^ (sums - 1) : ~0u;  // the nearest, and before it
        const unsigned int gaps = __ballot_sync(~0u, (found[w] & 3) == kNothing);
        if (done) continue;
        missing |= (gaps & up_to) != 0;
        if (up_to >> lane_id() & 1) of_lane += found[w] >> 2;
        done = sums != 0;
      }
    } while (missing);
    for (int step = kLanes / 2; step > 0; step /= 2) of_lane += __shfl_xor_sync(~0u, of_lane, step);
    sum += of_lane;
    if (done) break;
  }
  if (lane_id() == 0) known[part] = (sum + size) << 2 | kSumSoFar;
  return sum;
}

// Parts that thread blocks take in turn, a piece of each for every warp.
struct Turns {
  unsigned int* next;         // to be taken; 0 at first
  unsigned long long* known;  // of each turn; 0 at first

  // In shared memory.
  struct Shared {
    std::uint32_t sizes[kWarps];
    std::uint64_t front;
    unsigned int taken;
  };

  // The first turn of this thread block.
  __device__ std::uint64_t begin(Shared& shared) const {
    if (threadIdx.x == 0) shared.taken = atomicAdd(next, 1u);
    __syncthreads();
    return shared.taken;
  }

  // Where a warp's piece of this turn begins behind all pieces in front, and where the turn ends.
  // All threads of the block call it; `shared.taken` is the block's next turn then.
  struct Place {
    std::uint64_t begin, end;
  };
  __device__ Place place(std::uint64_t turn, std::uint32_t size, Shared& shared) const {
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    if (lane_id() == 0) shared.sizes[warp] = size;
    __syncthreads();
    const std::uint32_t one = lane_id() < kWarps ? shared.sizes[lane_id()] : 0;
    const std::uint32_t all = __reduce_add_sync(~0u, one);
    const std::uint32_t before = __reduce_add_sync(~0u, lane_id() < warp ? one : 0);
    if (warp == 0) {
      if (lane_id() == 0) publish(known, turn, all);
      const std::uint64_t front = sum_before<2>(known, turn, all);
      if (lane_id() == 0) {
        shared.front = front;
        shared.taken = atomicAdd(next, 1u);
      }
    }
    __syncthreads();
    return {shared.front + before, shared.front + all};
  }
};

}  // namespace cccl::cuda
