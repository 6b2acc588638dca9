#include "devices/cuda/device.h"

namespace cccl::cuda {
namespace {

[[noreturn]] void refuse() {
  throw UnsupportedError("this build has no CUDA code; rebuild with CCCLIB_CUDA=ON");
}

}  // namespace

bool built() { return false; }
int device_count() { return 0; }
std::shared_ptr<Queue> queue_on(int, void*) { refuse(); }
std::shared_ptr<Queue> new_queue(int) { refuse(); }
std::unique_ptr<Allocator> new_allocator(int) { refuse(); }
void copy_to_host(const std::byte*, MutableBytes, Queue&) { refuse(); }
void copy_from_host(Bytes, std::byte*, Queue&) { refuse(); }

}  // namespace cccl::cuda
