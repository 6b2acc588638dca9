#include <algorithm>

#include "devices/cuda/check.h"
#include "devices/cuda/fill.h"

namespace cccl::cuda {
namespace {

constexpr int kThreads = 1024;

// Byte by byte, at any alignment: it hardly ever writes. One block and one look at the flag, which
// lies in host memory: all becomes NaN or nothing does.
__global__ void fill_kernel(unsigned char* out, std::size_t bytes, std::uint64_t pattern, int size,
                            const volatile std::uint32_t* flag, const volatile Report* report) {
  const int part = static_cast<int>(threadIdx.x);
  bool mine = part == kMostParts && (!flag || *flag != 0);
  if (part < kMostParts) mine = (report[part].damaged | report[part].predicts_otherwise) != 0;
  if (!__syncthreads_or(mine)) return;
  for (std::size_t i = threadIdx.x; i < bytes; i += kThreads)
    out[i] = static_cast<unsigned char>(pattern >> 8 * (i % size));
}

constexpr int kCopyThreads = 256, kMostBlocks = 1024;

template <class Word>
__global__ void __launch_bounds__(kCopyThreads)
    copy_finite_kernel(const Word* from, Word* to, std::size_t count, Word infinity) {
  const std::size_t stride = std::size_t{gridDim.x} * kCopyThreads;
#pragma unroll 4
  for (std::size_t i = std::size_t{blockIdx.x} * kCopyThreads + threadIdx.x; i < count; i += stride)
    to[i] = (from[i] & infinity) == infinity ? Word{0} : from[i];
}

template <class Word>
void copy_finite(ConstValues from, Values to, Word infinity, cudaStream_t stream) {
  const std::size_t blocks = (to.count + kCopyThreads - 1) / kCopyThreads;
  const auto grid = static_cast<unsigned int>(std::min<std::size_t>(blocks, kMostBlocks));
  copy_finite_kernel<Word><<<grid, kCopyThreads, 0, stream>>>(
      static_cast<const Word*>(from.data), static_cast<Word*>(to.data), to.count, infinity);
  check(cudaGetLastError(), "a kernel launch");
}

__global__ void count_kernel(std::uint64_t* counter) { ++*counter; }

struct Places {
  const std::byte* at[kMostNumbers];
};

__global__ void read_kernel(__grid_constant__ const Places places, int count, std::uint64_t* to) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) to[i] = *reinterpret_cast<const std::uint64_t*>(places.at[i]);
}

std::uint64_t nan_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return 0x7E00;
    case DType::kBFloat16: return 0x7FC0;
    case DType::kFloat64: return 0x7FF8'0000'0000'0000;
    default: return 0x7FC0'0000;
  }
}

}  // namespace

void launch_fill_nan(Values out, const std::uint32_t* flag, const Report* report,
                     cudaStream_t stream) {
  if (!is_floating(out.dtype) || out.count == 0) return;
  fill_kernel<<<1, kThreads, 0, stream>>>(static_cast<unsigned char*>(out.data), out.bytes(),
                                          nan_of(out.dtype), static_cast<int>(size_of(out.dtype)),
                                          flag, report);
  check(cudaGetLastError(), "a kernel launch");
}

void launch_copy_finite(ConstValues from, Values to, cudaStream_t stream) {
  if (to.count == 0) return;
  if (reinterpret_cast<std::uintptr_t>(from.data) % size_of(from.dtype) != 0) {
    CCCLIB_CUDA(cudaMemcpyAsync, to.data, from.data, to.bytes(), cudaMemcpyDeviceToDevice, stream);
    from = to;
  }
  switch (from.dtype) {
    case DType::kFloat16: return copy_finite<std::uint16_t>(from, to, 0x7C00, stream);
    case DType::kBFloat16: return copy_finite<std::uint16_t>(from, to, 0x7F80, stream);
    case DType::kFloat64: return copy_finite<std::uint64_t>(from, to, 0x7FF0ull << 48, stream);
    default: return copy_finite<std::uint32_t>(from, to, 0x7F800000u, stream);
  }
}

void launch_count(std::uint64_t* counter, cudaStream_t stream) {
  count_kernel<<<1, 1, 0, stream>>>(counter);
  check(cudaGetLastError(), "a kernel launch");
}

void launch_read(std::span<const std::byte* const> places, std::uint64_t* to, cudaStream_t stream) {
  while (!places.empty()) {
    Places some{};
    const auto n = std::min<std::size_t>(places.size(), kMostNumbers);
    std::copy_n(places.begin(), n, some.at);
    read_kernel<<<1, kMostNumbers, 0, stream>>>(some, static_cast<int>(n), to);
    check(cudaGetLastError(), "a kernel launch");
    places = places.subspan(n);
    to += n;
  }
}

cudaError_t find_code() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, fill_kernel);
}

}  // namespace cccl::cuda
