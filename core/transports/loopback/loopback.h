// Ranks as threads of one process: for tests, and for trying algorithms without a network.
#pragma once

#include <memory>
#include <vector>

#include "api/transport.h"

namespace cccl {

// One transport per rank. A message is copied when both ends have posted it.
std::vector<std::shared_ptr<Transport>> make_loopback(int world_size);

}  // namespace cccl
