#include "scheduler/pool.h"

#include <atomic>

namespace cccl {
namespace {

std::atomic<std::size_t> pooled_bytes{0};

}  // namespace

Pool::~Pool() { pooled_bytes -= bytes_; }

std::byte* Pool::reserve(std::size_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    memory_ = allocator_->allocate(bytes);
    pooled_bytes += bytes - bytes_;
    bytes_ = bytes;
  }
  return memory_.get();
}

std::size_t Pool::process_bytes() { return pooled_bytes; }

}  // namespace cccl
