// Memory that runs of plans share.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "api/device.h"

namespace cccl {

// One block of memory that grows to what the largest plan needs and is used again by every call.
class Pool {
 public:
  explicit Pool(std::shared_ptr<Allocator> allocator) : allocator_(std::move(allocator)) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::byte* reserve(std::size_t bytes);
  static std::size_t process_bytes();  // of all pools of this process

 private:
  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<std::byte> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace cccl
