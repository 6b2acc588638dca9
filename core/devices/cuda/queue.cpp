#include "devices/cuda/queue.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "api/payload.h"
#include "devices/cuda/check.h"
#include "devices/cuda/device.h"

namespace cccl::cuda {
namespace {

// Of the first part with damage, and of the first rank with a non-finite value.
Findings read_findings(const Report* reports) {
  unsigned int damaged = 0, source = 0;
  const OtherPrediction* prediction = nullptr;
  for (const auto& part : std::span(reports, kMostParts)) {
    if (!damaged) damaged = part.damaged;
    if (part.predicts_otherwise) prediction = &part.prediction;
    if (part.non_finite && (!source || part.non_finite < source)) source = part.non_finite;
  }
  Findings found;
  if (damaged == kUnknownSource)
    found.damage = std::make_exception_ptr(
        CorruptPayloadError("payload body is damaged: its checksum does not match"));
  else if (damaged)
    found.damage = std::make_exception_ptr(CorruptPayloadError(
        "payload " + std::to_string(damaged - 1) +
        " of those read on a CUDA device is damaged, or of another codec, dtype or count than "
        "expected"));
  else if (prediction)
    found.damage = std::make_exception_ptr(error_of(*prediction));
  found.non_finite = source != 0;
  if (source && source != kUnknownSource) found.origin = static_cast<int>(source) - 1;
  return found;
}

void raise_if_damaged(Report* reports) {
  const auto found = read_findings(reports);
  if (!found.damage) return;
  for (auto& part : std::span(reports, kMostParts))  // it is told once
    part.damaged = part.predicts_otherwise = 0;
  std::rethrow_exception(found.damage);
}

// Page-locked memory takes long to make, and every collective has a report.
std::shared_ptr<Report> take_report() {
  static std::mutex mutex;
  static auto& unused = *new std::vector<Report*>;  // never destroyed, as the driver goes earlier
  const std::lock_guard lock(mutex);
  if (unused.empty()) {
    constexpr std::size_t kReports = 64, kBytes = kMostParts * sizeof(Report);
    RelaxedCapture relaxed;
    void* memory = nullptr;
    CCCLIB_CUDA(cudaHostAlloc, &memory, kReports * kBytes,
                cudaHostAllocMapped | cudaHostAllocPortable);
    for (std::size_t i = 0; i < kReports; ++i)
      unused.push_back(static_cast<Report*>(memory) + i * kMostParts);
  }
  auto* const taken = unused.back();
  unused.pop_back();
  std::fill_n(taken, kMostParts, Report{});
  return {taken, [](Report* report) {
            const std::lock_guard give_back(mutex);
            unused.push_back(report);
          }};
}

// To make one takes longer than to record it. Never destroyed, as the driver goes earlier.
class Events {
 public:
  static Events& of(int device, bool timed) {
    static std::mutex mutex;
    static auto& all = *new std::map<std::pair<int, bool>, Events>;
    const std::lock_guard lock(mutex);
    auto& events = all[{device, timed}];
    events.timed_ = timed;
    return events;
  }

  cudaEvent_t take() {
    {
      const std::lock_guard lock(mutex_);
      if (!unused_.empty()) {
        const auto event = unused_.back();
        unused_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    CCCLIB_CUDA(cudaEventCreateWithFlags, &event,
                timed_ ? cudaEventDefault : cudaEventDisableTiming);
    return event;
  }
  void give_back(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    unused_.push_back(event);
  }

 private:
  bool timed_ = false;
  std::mutex mutex_;
  std::vector<cudaEvent_t> unused_;
};

class CudaEvent final : public Event {
 public:
  CudaEvent(int device, cudaStream_t stream, std::shared_ptr<Report> report, bool timed)
      : device_(device),
        report_(std::move(report)),
        events_(Events::of(device, timed)),
        event_(events_.take()) {
    const auto status = cudaEventRecord(event_, stream);
    if (status == cudaSuccess) return;
    events_.give_back(event_);
    check(status, "cudaEventRecord");
  }
  ~CudaEvent() override { events_.give_back(event_); }

  bool done() const override {
    const RelaxedCapture
        relaxed;  // others may be capturing, which is none of this event's business
    const auto status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    check(status, "cudaEventQuery");
    return true;
  }
  void synchronize() override {
    DeviceGuard guard(device_);
    CCCLIB_CUDA(cudaEventSynchronize, event_);
    if (report_) raise_if_damaged(report_.get());
  }
  double seconds_since(const Event& earlier) const override {
    float milliseconds = 0;
    CCCLIB_CUDA(cudaEventElapsedTime, &milliseconds, static_cast<const CudaEvent&>(earlier).event_,
                event_);
    return 1e-3 * milliseconds;
  }
  cudaEvent_t event() const { return event_; }

 private:
  int device_;
  std::shared_ptr<Report> report_;
  Events& events_;
  cudaEvent_t event_;
};

}  // namespace

CudaQueue::CudaQueue(int device, cudaStream_t stream, bool owned)
    : device_(device), stream_(stream), owned_(owned) {}

CudaQueue::~CudaQueue() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  if (owned_) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  shared_ = {};
  cudaSetDevice(before);
}

const CudaQueue::Shared& CudaQueue::shared() const {
  std::call_once(made_, [&] {
    DeviceGuard guard(device_);
    RelaxedCapture relaxed;
    shared_.report = take_report();
    const auto zeros = allocate_zeros(device_, kMostParts * sizeof(Workspace));
    shared_.workspace = {zeros, reinterpret_cast<Workspace*>(zeros.get())};
  });
  return shared_;
}

std::unique_ptr<Event> CudaQueue::record(bool timed) {
  DeviceGuard guard(device_);
  return std::make_unique<CudaEvent>(device_, stream_, shared_.report, timed);
}

void CudaQueue::wait(const Event& event) {
  DeviceGuard guard(device_);
  if (const auto* cuda = dynamic_cast<const CudaEvent*>(&event))
    CCCLIB_CUDA(cudaStreamWaitEvent, stream_, cuda->event(), 0u);
}

std::function<Findings()> CudaQueue::watch() {
  shared();
  shared_.report = take_report();
  return [report = shared_.report] { return read_findings(report.get()); };
}

std::uint64_t CudaQueue::capture() const {
  auto status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  CCCLIB_CUDA(cudaStreamGetCaptureInfo, stream_, &status, &number);
  return status == cudaStreamCaptureStatusNone ? 0 : number;
}

void CudaQueue::synchronize() {
  DeviceGuard guard(device_);
  CCCLIB_CUDA(cudaStreamSynchronize, stream_);
  if (shared_.report) raise_if_damaged(shared_.report.get());
}

CudaQueue& cuda_queue(Queue& queue) {
  if (auto* cuda = dynamic_cast<CudaQueue*>(&queue)) return *cuda;
  throw UnsupportedError("a CUDA codec needs the queue of a CUDA device");
}

std::uint64_t resident_blocks(const void* kernel, int threads, std::size_t memory, int device) {
  static std::mutex mutex;
  // To ask takes microseconds. Never destroyed, as other threads may launch while the process ends.
  static auto& known = *new std::map<std::pair<const void*, int>, std::uint64_t>;
  const std::lock_guard lock(mutex);
  auto& found = known[{kernel, device}];
  if (found) return found;
  if (memory > 0)
    CCCLIB_CUDA(cudaFuncSetAttribute, kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                static_cast<int>(memory));
  int processors = 0, blocks = 0;
  CCCLIB_CUDA(cudaDeviceGetAttribute, &processors, cudaDevAttrMultiProcessorCount, device);
  CCCLIB_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, kernel, threads, memory);
  return found = static_cast<std::uint64_t>(processors) * blocks;
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
