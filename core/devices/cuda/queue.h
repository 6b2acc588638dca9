// A stream as a Queue, with what its kernels share.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "api/device.h"

namespace cccl::cuda {

// Device memory of one queue: what the blocks of a kernel add up. The last block of each kernel
// leaves it all zero, so that kernels of one stream can follow each other without a reset.
struct Workspace {
  unsigned long long read, written;  // checksums
  unsigned int flags, done;          // what blocks found, and how many are done
};

// Host memory that kernels of one queue report to.
struct Report {
  unsigned int damaged;  // 0: none; else 1 + the number of a damaged payload, or kUnknownSource
};
inline constexpr unsigned int kUnknownSource = ~0u;

class CudaQueue final : public Queue {
 public:
  // `stream` stays the caller's unless `owned`.
  CudaQueue(int device, cudaStream_t stream, bool owned);
  ~CudaQueue() override;

  Device device() const override { return {DeviceKind::kCuda, device_}; }
  std::unique_ptr<Event> record() override;
  void wait(const Event& event) override;
  void* native() const override { return stream_; }

  // Throws CorruptPayloadError if a kernel found a damaged payload since the last call, DeviceError
  // if one failed.
  void synchronize() override;

  cudaStream_t stream() const { return stream_; }
  Workspace* workspace() const { return workspace_; }
  Report* report() const { return report_.get(); }

 private:
  int device_;
  cudaStream_t stream_;
  bool owned_;
  Workspace* workspace_ = nullptr;
  std::shared_ptr<Report> report_;  // shared with events, which may outlive the queue
};

// `queue` as what it must be. Throws UnsupportedError for another device's.
CudaQueue& cuda_queue(Queue& queue);

}  // namespace cccl::cuda
