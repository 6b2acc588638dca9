// Where work runs. A Queue is an ordered stream of work; an Event marks a point in one.
#pragma once

#include <cstddef>
#include <memory>

namespace cccl {

enum class DeviceKind { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
};

// A point in a queue that other queues, or the host, can wait for.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() const = 0;
  virtual void synchronize() = 0;  // the host waits
};

// Work submitted to one queue runs in order. A CPU queue has run it when submit returns.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual Device device() const = 0;
  virtual std::unique_ptr<Event> record() = 0;
  virtual void wait(const Event& event) = 0;  // later work here starts after `event`
  virtual void synchronize() = 0;
  virtual void* native() const = 0;  // cudaStream_t on CUDA, null on a CPU
};

// Memory for payloads in flight, aligned to kPayloadAlignment.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
};

}  // namespace cccl
