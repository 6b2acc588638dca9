// CUDA as the rest of the core sees it, without a header of the toolkit. A build without CUDA has
// the same functions (absent.cpp): it finds no device and refuses to make anything on one.
#pragma once

#include <cstddef>
#include <memory>

#include "api/buffer.h"
#include "api/device.h"

namespace cccl::cuda {

bool built();  // whether this build has CUDA code

int device_count();  // 0 without a driver or a build for it

// A queue on `stream` (a cudaStream_t; null: the legacy default stream). The same stream always
// has the same queue.
std::shared_ptr<Queue> queue_on(int device, void* stream);

// Plain memory on a device.
std::shared_ptr<std::byte> allocate(int device, std::size_t bytes);
std::shared_ptr<std::byte> allocate_zeros(int device, std::size_t bytes);

// Throws DeviceError where the driver is too old, or this build has no code for the device.
std::shared_ptr<const Platform> platform(int device);

// Names what the host submits from here on, for profilers (NVTX); nests.
void push_range(const char* name);
void pop_range();

// Behind the work in `queue`; the host waits, and sees errors of that work as synchronize() does.
void copy_to_host(const std::byte* from, MutableBytes to, Queue& queue);
void copy_from_host(Bytes from, std::byte* to, Queue& queue);

}  // namespace cccl::cuda
