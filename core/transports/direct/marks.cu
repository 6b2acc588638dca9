#include "devices/cuda/launch.cuh"
#include "transports/direct/marks.h"

namespace cccl::direct {
namespace {

constexpr int kPolls = 256;  // of a mark, for each look at host memory

__device__ void store(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}

__device__ std::uint64_t load(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__global__ void __launch_bounds__(kMostMarks)
    marks_kernel(__grid_constant__ const Marks to_set, __grid_constant__ const Marks to_await,
                 const volatile std::uint32_t* given_up) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for the kernel in front of it
#endif
  const int i = static_cast<int>(threadIdx.x);
  if (i == 0 && to_set.advance) *to_set.base += to_set.advance;
  __syncthreads();
  const std::uint64_t base = *to_set.base;
  if (i < to_set.count && !*given_up) {
    __threadfence_system();
    store(to_set.marks[i].at, base + to_set.marks[i].value);
  }
  if (i >= to_await.count) return;
  const auto& mark = to_await.marks[i];
  for (int polls = 1; load(mark.at) < base + mark.value; ++polls)
    if (polls % kPolls == 0 && *given_up) return;
}

}  // namespace

void launch(const Marks& to_set, const Marks& to_await, const std::uint32_t* given_up, int device,
            cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = 1;
  config.blockDim = kMostMarks;
  config.stream = stream;
  cuda::launch_early(config, device, marks_kernel, to_set, to_await, given_up);
}

}  // namespace cccl::direct
