#include "devices/cpu/queue.h"

#include <new>

#include "api/payload.h"

namespace cccl {

std::shared_ptr<std::byte> CpuAllocator::allocate(std::size_t bytes) {
  constexpr std::align_val_t alignment{kPayloadAlignment};
  auto* memory = static_cast<std::byte*>(::operator new(bytes, alignment));
  return {memory, [](std::byte* p) { ::operator delete(p, std::align_val_t{kPayloadAlignment}); }};
}

}  // namespace cccl
