// How long payloads are whose values decide it, where both ends of a transfer must name that.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "api/device.h"
#include "api/transport.h"

namespace cccl {

struct SizesJob {
  Transport& transport;
  const Platform& platform;
  Queue& queue;
  Seconds deadline;
  std::vector<std::shared_ptr<Event>> earlier;  // the deadline counts from when these are done
};

// `transfers` are those of a step, with the most bytes that each may have. Those at `open` get the
// bytes that their payloads do have, on both ends alike: the number in a payload's header goes from
// its sender to where the receiver will have that header, and the host reads it there. It waits for
// the work in the queue and, where this rank receives, for the senders' numbers: what was posted
// before goes on meanwhile. Returns the requests of the numbers, one for each of `open`: those of
// sends must be awaited before the payload's memory is used again, the others are.
std::vector<Request> learn_sizes(std::span<Transfer> transfers, std::span<const std::size_t> open,
                                 const SizesJob& job);

}  // namespace cccl
