#include "devices/cuda/peers.h"

#include <map>
#include <mutex>
#include <shared_mutex>

namespace cccl::cuda {
namespace {

// Never destroyed, as other threads may launch while the process ends.
auto& mutex = *new std::shared_mutex;
auto& sizes = *new std::map<const std::byte*, std::size_t>;  // by where each begins

}  // namespace

void add_peer_memory(const std::byte* begin, std::size_t bytes) {
  const std::unique_lock lock(mutex);
  sizes[begin] = bytes;
}

void remove_peer_memory(const std::byte* begin) {
  const std::unique_lock lock(mutex);
  sizes.erase(begin);
}

bool is_peer_memory(const std::byte* at) {
  const std::shared_lock lock(mutex);
  const auto next = sizes.upper_bound(at);
  if (next == sizes.begin()) return false;
  const auto& [begin, bytes] = *std::prev(next);
  return at < begin + bytes;
}

}  // namespace cccl::cuda
