#include <algorithm>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <nvtx3/nvToolsExt.h>

#include "api/codec.h"
#include "api/measure.h"
#include "devices/cuda/check.h"
#include "devices/cuda/device.h"
#include "devices/cuda/fill.h"
#include "devices/cuda/queue.h"
#include "devices/cuda/residual.h"

namespace cccl::cuda {
namespace {

std::shared_ptr<std::byte> allocate_host(std::size_t bytes) {
  RelaxedCapture relaxed;
  void* memory = nullptr;
  CCCLIB_CUDA(cudaHostAlloc, &memory, bytes, cudaHostAllocMapped);
  return {static_cast<std::byte*>(memory), [](std::byte* data) { cudaFreeHost(data); }};
}

// In the order of its queue, so that to grow needs no wait; in a capture it is the graph's own.
class CudaAllocator final : public Allocator {
 public:
  explicit CudaAllocator(CudaQueue& queue) : queue_(queue) {}

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    const int device = queue_.device().index;
    DeviceGuard guard(device);
    void* memory = nullptr;
    const auto stream = queue_.stream();
    CCCLIB_CUDA(cudaMallocAsync, &memory, bytes, stream);
    return {static_cast<std::byte*>(memory),
            [stream](std::byte* data) { cudaFreeAsync(data, stream); }};
  }

 private:
  CudaQueue& queue_;
};

// Values before and after a codec, on their way to the host.
struct CudaErrorSample final : ErrorSample {
  ErrorSums sums() const override { return compare(before, after); }
  std::shared_ptr<std::byte> memory;
  Values before, after;
};

class CudaPlatform final : public Platform {
 public:
  explicit CudaPlatform(int device) : device_(device) {}

  Device device() const override { return {DeviceKind::kCuda, device_}; }
  void enter_thread() const override { cudaSetDevice(device_); }  // what fails, fails again

  std::unique_ptr<Queue> new_queue() const override {
    DeviceGuard guard(device_);
    int lowest = 0, highest = 0;
    CCCLIB_CUDA(cudaDeviceGetStreamPriorityRange, &lowest, &highest);
    cudaStream_t stream = nullptr;
    CCCLIB_CUDA(cudaStreamCreateWithPriority, &stream, cudaStreamNonBlocking, highest);
    return std::make_unique<CudaQueue>(device_, stream, true);
  }

  std::shared_ptr<Queue> queue_on(void* stream) const override {
    return cuda::queue_on(device_, stream);
  }
  std::unique_ptr<Queue> new_queue_on(void* stream) const override {
    return std::make_unique<CudaQueue>(device_, static_cast<cudaStream_t>(stream), false);
  }

  std::unique_ptr<Allocator> allocator_for(Queue& queue) const override {
    return std::make_unique<CudaAllocator>(cuda_queue(queue));
  }

  Flag new_flag() const override {
    using Value = std::atomic<std::uint32_t>;
    const auto memory = allocate_host(sizeof(Value));
    return {memory, new (memory.get()) Value(0)};
  }

  std::shared_ptr<std::uint64_t> new_counter() const override {
    const auto zeros = allocate_zeros(device_, sizeof(std::uint64_t));
    return {zeros, reinterpret_cast<std::uint64_t*>(zeros.get())};
  }

  void count(std::uint64_t* counter, Queue& queue) const override {
    DeviceGuard guard(device_);
    launch_count(counter, cuda_queue(queue).stream());
  }

  void copy(ConstValues from, Values to, Queue& queue) const override {
    if (from.bytes() == 0 || to.data == from.data) return;
    DeviceGuard guard(device_);
    CCCLIB_CUDA(cudaMemcpyAsync, to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice,
                cuda_queue(queue).stream());
  }

  std::shared_ptr<const std::uint64_t> read_numbers(std::span<const std::byte* const> places,
                                                    Queue& queue) const override {
    DeviceGuard guard(device_);
    const auto memory = pinned(places.size() * sizeof(std::uint64_t));
    const std::shared_ptr<std::uint64_t> numbers{memory,
                                                 reinterpret_cast<std::uint64_t*>(memory.get())};
    launch_read(places, numbers.get(), cuda_queue(queue).stream());
    return numbers;
  }

  void fill_nan(Values out, const Flag& flag, Queue& queue) const override {
    DeviceGuard guard(device_);
    const auto& on = cuda_queue(queue);
    launch_fill_nan(out, reinterpret_cast<const std::uint32_t*>(flag.get()), on.report(),
                    on.stream());
  }

  void copy_finite(ConstValues from, Values to, Queue& queue) const override {
    DeviceGuard guard(device_);
    launch_copy_finite(from, to, cuda_queue(queue).stream());
  }
  void read(const std::byte* from, MutableBytes to, Queue& queue) const override {
    copy_to_host(from, to, queue);
  }
  void write(Bytes from, std::byte* to, Queue& queue) const override {
    copy_from_host(from, to, queue);
  }
  void clear(MutableBytes memory, Queue& queue) const override {
    DeviceGuard guard(device_);
    CCCLIB_CUDA(cudaMemsetAsync, memory.data(), 0, memory.size(), cuda_queue(queue).stream());
  }

  void swap(std::span<std::uint32_t* const> swapped, const std::uint32_t* spoiled,
            Queue& queue) const override {
    DeviceGuard guard(device_);
    launch_swap(swapped, spoiled, cuda_queue(queue).stream());
  }
  void spoil(std::uint32_t* spoiled, const Flag& flag, Queue& queue) const override {
    if (!spoiled) return;
    DeviceGuard guard(device_);
    const auto& on = cuda_queue(queue);
    launch_spoil(spoiled, reinterpret_cast<const std::uint32_t*>(flag.get()), on.report(),
                 on.stream());
  }

  std::size_t encode(const Codec& codec, const EncodeArgs& args, const Residual& residual,
                     Queue& queue) const override {
    return encode_with_residual(codec, args, residual, queue);
  }
  std::size_t reduce_encode(const Codec& first, const ReduceArgs& args, const Codec& second,
                            const EncodeArgs& target, const Residual& residual,
                            Queue& queue) const override {
    return reduce_encode_with_residual(first, args, second, target, residual, queue);
  }

  std::unique_ptr<ErrorSample> sample_error(const Codec& codec, const EncodeArgs& args,
                                            Queue& queue) const override {
    DeviceGuard guard(device_);
    const auto& on = cuda_queue(queue);
    EncodeArgs sampled = args;
    sampled.in = args.in.part(0, std::min(kErrorSample, args.in.count));
    const auto [_, count, dtype] = sampled.in;
    const auto bytes = sampled.in.bytes(), payload = codec.max_encoded_bytes(count, dtype);
    auto sample = std::make_unique<CudaErrorSample>();
    sample->memory = pinned(2 * bytes);
    sample->before = {sample->memory.get(), count, dtype};
    sample->after = {sample->memory.get() + bytes, count, dtype};

    const auto memory = CudaAllocator(cuda_queue(queue)).allocate(bytes + payload);
    sampled.out = {memory.get() + bytes, payload};
    const auto to_host = [&](const void* from, void* to) {
      CCCLIB_CUDA(cudaMemcpyAsync, to, from, bytes, cudaMemcpyDeviceToHost, on.stream());
    };
    to_host(sampled.in.data, sample->before.data);
    codec.encode(sampled, queue);
    codec.decode(sampled.out, {memory.get(), count, dtype}, queue);
    to_host(memory.get(), sample->after.data);
    return sample;
  }

 private:
  // Page-locked memory takes long to make, and what needs some is frequent: all of one size.
  static constexpr std::size_t kPinnedBytes = 2 * kErrorSample * sizeof(double);
  struct Pinned {
    std::mutex mutex;
    std::vector<std::shared_ptr<std::byte>> unused;
  };
  std::shared_ptr<std::byte> pinned(std::size_t bytes) const {
    if (bytes > kPinnedBytes)
      throw Error("blocks of page-locked memory have " + std::to_string(kPinnedBytes) +
                  " bytes, needed are " + std::to_string(bytes));
    std::shared_ptr<std::byte> memory;
    {
      const std::lock_guard lock(pinned_->mutex);
      if (!pinned_->unused.empty()) {
        memory = std::move(pinned_->unused.back());
        pinned_->unused.pop_back();
      }
    }
    if (!memory) memory = allocate_host(kPinnedBytes);
    auto* const data = memory.get();
    return {data, [memory = std::move(memory), pinned = pinned_](std::byte*) mutable {
              const std::lock_guard lock(pinned->mutex);
              pinned->unused.push_back(std::move(memory));
            }};
  }

  int device_;
  std::shared_ptr<Pinned> pinned_ = std::make_shared<Pinned>();
};

std::string version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace

std::shared_ptr<std::byte> allocate(int device, std::size_t bytes) {
  DeviceGuard guard(device);
  RelaxedCapture relaxed;
  void* memory = nullptr;
  CCCLIB_CUDA(cudaMalloc, &memory, bytes);
  return {static_cast<std::byte*>(memory), [device](std::byte* data) {
            int before = 0;
            cudaGetDevice(&before);
            cudaSetDevice(device);
            cudaFree(data);
            cudaSetDevice(before);
          }};
}

std::shared_ptr<std::byte> allocate_zeros(int device, std::size_t bytes) {
  DeviceGuard guard(device);
  RelaxedCapture relaxed;
  auto memory = allocate(device, bytes);
  // On a stream of its own: another may be captured, and a non-blocking one waits for none.
  cudaStream_t stream = nullptr;
  CCCLIB_CUDA(cudaStreamCreateWithFlags, &stream, cudaStreamNonBlocking);
  cudaMemsetAsync(memory.get(), 0, bytes, stream);
  const auto status = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check(status, "cudaMemsetAsync");
  return memory;
}

std::shared_ptr<const Platform> platform(int device) {
  int count = 0, driver = 0;
  if (cudaGetDeviceCount(&count) == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    cudaDriverGetVersion(&driver);
    if (driver == 0) throw DeviceError("this machine has no driver for CUDA devices");
    throw DeviceError("the GPU driver is too old: it supports CUDA " + version(driver) +
                      ", and this build needs CUDA " + version(CUDART_VERSION) +
                      ". Update the driver, or install the build for an earlier CUDA.");
  }
  DeviceGuard guard(device);
  const auto found = find_code();
  if (found == cudaErrorNoKernelImageForDevice || found == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    int major = 0, minor = 0;
    CCCLIB_CUDA(cudaDeviceGetAttribute, &major, cudaDevAttrComputeCapabilityMajor, device);
    CCCLIB_CUDA(cudaDeviceGetAttribute, &minor, cudaDevAttrComputeCapabilityMinor, device);
    const auto sm = std::to_string(major) + std::to_string(minor);
    throw DeviceError("CUDA device " + std::to_string(device) + " is an sm_" + sm +
                      ", for which this build has no code (it has " CCCLIB_CUDA_ARCHITECTURES
                      "). Rebuild with -DCMAKE_CUDA_ARCHITECTURES=" +
                      sm);
  }
  check(found, "cudaFuncGetAttributes");
  return std::make_shared<const CudaPlatform>(device);
}

void push_range(const char* name) { nvtxRangePushA(name); }
void pop_range() { nvtxRangePop(); }

}  // namespace cccl::cuda
