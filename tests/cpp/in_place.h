// Ranks as threads that read payloads in each other's memory, as GPUs of one host do.
#pragma once

#include <memory>
#include <vector>

#include "api/transport.h"

namespace cccl::testing {

// Each reads in place what it can, by the notes of transports/direct; all else goes in groups.
// Every read and write of a payload that its notes do not order is a race, which ThreadSanitizer
// sees.
std::vector<std::shared_ptr<Transport>> make_in_place(int world_size);

}  // namespace cccl::testing
