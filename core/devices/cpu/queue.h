#pragma once

#include "api/device.h"

namespace cccl {

// Runs work on the calling thread at once: what a transport moves meanwhile is the overlap.
class CpuQueue final : public Queue {
 public:
  Device device() const override { return {DeviceKind::kCpu, 0}; }
  std::unique_ptr<Event> record() override { return std::make_unique<Done>(); }
  void wait(const Event&) override {}
  void synchronize() override {}
  void* native() const override { return nullptr; }

 private:
  struct Done final : Event {
    bool done() const override { return true; }
    void synchronize() override {}
  };
};

class CpuAllocator final : public Allocator {
 public:
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override;
};

}  // namespace cccl
