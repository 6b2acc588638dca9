// A stream as a Queue, with what its kernels share.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <mutex>

#include "api/device.h"
#include "api/payload.h"

namespace cccl::cuda {

// How many payloads one launch may write, or decode: one per blockIdx.y.
inline constexpr int kMostParts = 8;

// Device memory of one queue, for each part of a launch: what its blocks add up. The last block of
// each kernel leaves it all zero, so that kernels of one stream can follow each other without a
// reset.
struct Workspace {
  unsigned long long read, written;  // checksums
  unsigned int flags, done;          // what blocks found, and how many are done
};

// Host memory that kernels of one queue report to, for each part of a launch.
struct Report {
  unsigned int damaged;     // 0: none; else 1 + the number of a damaged payload, or kUnknownSource
  unsigned int non_finite;  // 0: none; else 1 + the rank that it came from, or kUnknownSource
  unsigned int predicts_otherwise;  // 1: a payload goes by another prediction
  OtherPrediction prediction;       // then: by which
};
inline constexpr unsigned int kUnknownSource = ~0u;

class CudaQueue final : public Queue {
 public:
  // `stream` stays the caller's unless `owned`.
  CudaQueue(int device, cudaStream_t stream, bool owned);
  ~CudaQueue() override;

  Device device() const override { return {DeviceKind::kCuda, device_}; }
  std::unique_ptr<Event> record(bool timed) override;
  void wait(const Event& event) override;
  void* native() const override { return stream_; }
  std::function<Findings()> watch() override;
  std::uint64_t capture() const override;

  // Throws CorruptPayloadError if a kernel found a damaged payload since the last call, DeviceError
  // if one failed.
  void synchronize() override;

  cudaStream_t stream() const { return stream_; }
  Workspace* workspace() const { return shared().workspace.get(); }  // kMostParts of them
  Report* report() const { return shared().report.get(); }           // kMostParts of them, watched

 private:
  struct Shared {
    std::shared_ptr<Workspace> workspace;
    std::shared_ptr<Report> report;  // events, which may outlive the queue, have it too
  };
  // Made when first needed: many queues only wait.
  const Shared& shared() const;

  int device_;
  cudaStream_t stream_;
  bool owned_;
  mutable std::once_flag made_;
  mutable Shared shared_;
};

// `queue` as what it must be. Throws UnsupportedError for another device's.
CudaQueue& cuda_queue(Queue& queue);

// How many blocks of a kernel, with `memory` bytes of dynamic shared memory, a device runs at once.
// That much is allowed from then on.
std::uint64_t resident_blocks(const void* kernel, int threads, std::size_t memory, int device);

}  // namespace cccl::cuda
