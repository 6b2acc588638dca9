// Calls of the CUDA runtime that throw DeviceError.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "api/error.h"
#include "devices/cpu/float_environment.h"

namespace cccl::cuda {

[[noreturn]] inline void throw_device_error(cudaError_t status, const char* call) {
  cudaGetLastError();  // an error that is not sticky must not meet the next caller
  int device = -1;
  cudaGetDevice(&device);
  throw DeviceError(std::string(call) + " failed on CUDA device " + std::to_string(device) + ": " +
                    cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
}

inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw_device_error(status, call);
}

#define CCCLIB_CUDA(function, ...) ::cccl::cuda::check(function(__VA_ARGS__), #function)

// Makes `device` current while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    CCCLIB_CUDA(cudaGetDevice, &before_);
    if (device != before_) CCCLIB_CUDA(cudaSetDevice, device);
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_, before_ = 0;
};

// While a codec's call lives: its device, and arithmetic of the host that is the same for all
// callers, as it makes what kernels are given.
class CodecCall {
 public:
  explicit CodecCall(int device) : device_(device) {}

 private:
  DeviceGuard device_;
  FloatEnvironment environment_;
};

// Allows this thread what a capture into a graph forbids by default, such as allocations.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace cccl::cuda
