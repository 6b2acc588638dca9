// A transport whose bytes somebody else moves: a frontend's process group.
#pragma once

#include <functional>
#include <memory>

#include "api/transport.h"

namespace cccl {

// Called from the communicator's own thread, except abort, which may come from any. They throw
// cccl errors; requests are the frontend's numbers, other than 0.
struct ExternalCallbacks {
  std::function<void(std::span<Transfer>)> post;
  std::function<void(std::span<const Request>, Seconds)> wait;
  std::function<void(const std::string&)> abort;
};

std::shared_ptr<Transport> make_external(int rank, int size, ExternalCallbacks callbacks);

}  // namespace cccl
