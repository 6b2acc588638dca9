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
std::shared_ptr<std::byte> allocate(int, std::size_t) { refuse(); }
std::shared_ptr<const Platform> platform(int) { refuse(); }
void push_range(const char*) {}
void pop_range() {}
void copy_to_host(const std::byte*, MutableBytes, Queue&) { refuse(); }
void copy_from_host(Bytes, std::byte*, Queue&) { refuse(); }

}  // namespace cccl::cuda
