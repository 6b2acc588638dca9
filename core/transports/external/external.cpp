#include "transports/external/external.h"

#include <cstdio>

#include "api/error.h"

namespace cccl {
namespace {

class External final : public Transport {
 public:
  External(int rank, int size, ExternalCallbacks callbacks)
      : rank_(rank), size_(size), callbacks_(std::move(callbacks)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  DeviceKind device() const override { return DeviceKind::kCpu; }

  void post(std::span<Transfer> transfers, Queue& queue) override {
    if (transfers.empty()) return;
    queue.synchronize();
    callbacks_.post(transfers);
  }

  void wait(std::span<const Request> requests, Queue&, Seconds deadline) override {
    if (!requests.empty()) callbacks_.wait(requests, deadline);
  }

  void abort(const std::string& reason) noexcept override {
    try {
      callbacks_.abort(reason);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "cccl: abort of rank %d failed: %s\n", rank_, error.what());
    }
  }

 private:
  int rank_, size_;
  ExternalCallbacks callbacks_;
};

}  // namespace

std::shared_ptr<Transport> make_external(int rank, int size, ExternalCallbacks callbacks) {
  if (size < 1 || rank < 0 || rank >= size)
    throw ConfigError("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                      ": a rank counts from 0 to size - 1");
  return std::make_shared<External>(rank, size, std::move(callbacks));
}

}  // namespace cccl
