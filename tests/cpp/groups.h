// Ranks as threads whose transfers are groups, as NCCL's are: a step is one group, and both ends of
// a transfer name the same bytes in the same group.
#pragma once

#include <memory>
#include <vector>

#include "api/transport.h"

namespace cccl::testing {

// What NCCL would wait for without end, or take for something else, is a TransportError here.
// `buffered`: sends of payloads end at once, as NCCL's may, and those of sizes do not.
std::vector<std::shared_ptr<Transport>> make_groups(int world_size, bool buffered = false);

}  // namespace cccl::testing
