// The host waits for a queue, while somebody looks after the peers.
#pragma once

#include "api/device.h"
#include "api/transport.h"

namespace cccl {

inline constexpr Seconds kForever{1e9};

// Until `event` is done. Throws what the transport's check() throws, and DeadlineError once
// `deadline` has passed.
void wait_on_host(const Event& event, Transport& transport, Seconds deadline);

}  // namespace cccl
