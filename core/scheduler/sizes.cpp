#include "scheduler/sizes.h"

#include <algorithm>
#include <cstdint>

#include "api/payload.h"
#include "scheduler/wait.h"

namespace cccl {

std::vector<Request> learn_sizes(std::span<Transfer> transfers, std::span<const std::size_t> open,
                                 const SizesJob& job) {
  std::vector<Transfer> sizes;
  std::vector<const std::byte*> places;
  for (const auto i : open) {
    auto& size = sizes.emplace_back(transfers[i]);
    size.data += offsetof(PayloadHeader, body_bytes);
    size.bytes = sizeof(PayloadHeader::body_bytes);
    places.push_back(size.data);
  }
  job.transport.post_sizes(sizes, job.queue);
  if (sizes.empty()) return {};
  std::vector<Request> requests, received;
  for (const auto& size : sizes) {
    requests.push_back(size.request);
    if (size.direction == Direction::kReceive) received.push_back(size.request);
  }
  // What a rank sends it can read at once: who only sends must not wait for who receives.
  if (!received.empty()) job.transport.wait(received, job.queue, job.deadline);
  const auto numbers = job.platform.read_numbers(places, job.queue);
  const auto known = job.queue.record();
  for (const auto& event : job.earlier) wait_on_host(*event, job.transport, kForever);
  wait_on_host(*known, job.transport, job.deadline);
  // Damaged or not, it is the same number on both ends, and no more than there is room for.
  for (std::size_t i = 0; i < open.size(); ++i) {
    auto& bytes = transfers[open[i]].bytes;
    bytes = sizeof(PayloadHeader) +
            std::min<std::uint64_t>(numbers.get()[i], bytes - sizeof(PayloadHeader));
  }
  return requests;
}

}  // namespace cccl
