#include "devices/cuda/queue.h"

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "api/payload.h"
#include "devices/cuda/check.h"
#include "devices/cuda/device.h"

namespace cccl::cuda {
namespace {

void raise_if_damaged(Report& report) {
  const unsigned int damaged = std::exchange(report.damaged, 0u);
  if (damaged == kUnknownSource)
    throw CorruptPayloadError("payload body is damaged: its checksum does not match");
  if (damaged)
    throw CorruptPayloadError("payload " + std::to_string(damaged - 1) +
                              " of those read on a CUDA device is damaged, or of another codec, "
                              "dtype or count than expected");
}

class CudaEvent final : public Event {
 public:
  CudaEvent(int device, cudaStream_t stream, std::shared_ptr<Report> report)
      : device_(device), report_(std::move(report)) {
    CCCLIB_CUDA(cudaEventCreateWithFlags, &event_, cudaEventDisableTiming);
    CCCLIB_CUDA(cudaEventRecord, event_, stream);
  }
  ~CudaEvent() override { cudaEventDestroy(event_); }

  bool done() const override {
    const auto status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    check(status, "cudaEventQuery");
    return true;
  }
  void synchronize() override {
    DeviceGuard guard(device_);
    CCCLIB_CUDA(cudaEventSynchronize, event_);
    raise_if_damaged(*report_);
  }
  cudaEvent_t event() const { return event_; }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
  std::shared_ptr<Report> report_;
};

class CudaAllocator final : public Allocator {
 public:
  explicit CudaAllocator(int device) : device_(device) {}

  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    DeviceGuard guard(device_);
    void* memory = nullptr;
    CCCLIB_CUDA(cudaMalloc, &memory, bytes);
    return {static_cast<std::byte*>(memory), [device = device_](std::byte* data) {
              int before = 0;
              cudaGetDevice(&before);
              cudaSetDevice(device);
              cudaFree(data);
              cudaSetDevice(before);
            }};
  }

 private:
  int device_;
};

}  // namespace

CudaQueue::CudaQueue(int device, cudaStream_t stream, bool owned)
    : device_(device), stream_(stream), owned_(owned) {
  DeviceGuard guard(device);
  void* report = nullptr;
  CCCLIB_CUDA(cudaHostAlloc, &report, sizeof(Report), cudaHostAllocMapped);
  report_ = {new (report) Report{}, [](Report* memory) { cudaFreeHost(memory); }};
  CCCLIB_CUDA(cudaMalloc, reinterpret_cast<void**>(&workspace_), sizeof(Workspace));
  CCCLIB_CUDA(cudaMemset, workspace_, 0, sizeof(Workspace));
  CCCLIB_CUDA(cudaStreamSynchronize, cudaStreamLegacy);  // a non-blocking stream would not wait
}

CudaQueue::~CudaQueue() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  if (owned_) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  cudaFree(workspace_);
  cudaSetDevice(before);
}

std::unique_ptr<Event> CudaQueue::record() {
  DeviceGuard guard(device_);
  return std::make_unique<CudaEvent>(device_, stream_, report_);
}

void CudaQueue::wait(const Event& event) {
  DeviceGuard guard(device_);
  if (const auto* cuda = dynamic_cast<const CudaEvent*>(&event))
    CCCLIB_CUDA(cudaStreamWaitEvent, stream_, cuda->event(), 0u);
}

void CudaQueue::synchronize() {
  DeviceGuard guard(device_);
  CCCLIB_CUDA(cudaStreamSynchronize, stream_);
  raise_if_damaged(*report_);
}

CudaQueue& cuda_queue(Queue& queue) {
  if (auto* cuda = dynamic_cast<CudaQueue*>(&queue)) return *cuda;
  throw UnsupportedError("a CUDA codec needs the queue of a CUDA device");
}

bool built() { return true; }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::shared_ptr<Queue> queue_on(int device, void* stream) {
  static std::mutex mutex;
  // Never destroyed: at exit the driver may be gone before these would be.
  static auto& queues = *new std::map<std::pair<int, void*>, std::shared_ptr<Queue>>;
  std::lock_guard lock(mutex);
  auto& queue = queues[{device, stream}];
  if (!queue) queue = std::make_shared<CudaQueue>(device, static_cast<cudaStream_t>(stream), false);
  return queue;
}

std::shared_ptr<Queue> new_queue(int device) {
  DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  CCCLIB_CUDA(cudaStreamCreateWithFlags, &stream, cudaStreamNonBlocking);
  return std::make_shared<CudaQueue>(device, stream, true);
}

std::unique_ptr<Allocator> new_allocator(int device) {
  return std::make_unique<CudaAllocator>(device);
}

void copy_to_host(const std::byte* from, MutableBytes to, Queue& queue) {
  auto& on = cuda_queue(queue);
  DeviceGuard guard(on.device().index);
  CCCLIB_CUDA(cudaMemcpyAsync, to.data(), from, to.size(), cudaMemcpyDeviceToHost, on.stream());
  on.synchronize();
}

void copy_from_host(Bytes from, std::byte* to, Queue& queue) {
  auto& on = cuda_queue(queue);
  DeviceGuard guard(on.device().index);
  CCCLIB_CUDA(cudaMemcpyAsync, to, from.data(), from.size(), cudaMemcpyHostToDevice, on.stream());
  on.synchronize();
}

}  // namespace cccl::cuda
