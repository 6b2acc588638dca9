// GPUs of one host that reach each other's memory: a payload is read where its sender wrote it, by
// the kernel that decodes it. No copy, and nothing in between but a mark that it is there.
#pragma once

#include <functional>
#include <memory>

#include "api/transport.h"
#include "transports/side_channel.h"

namespace cccl::direct {

struct Options {
  int rank = 0, size = 1, device = 0;
  bool wanted = true;
  Seconds deadline{0};  // of an exchange
};

// Null where that is not possible between all ranks, or one does not want it: the same on all of
// them, which call this together. `check`: as Transport::check.
std::unique_ptr<Transport> connect(const Options& options, const SideChannel& side_channel,
                                   std::function<void()> check);

}  // namespace cccl::direct
