// How ranks reach each other beside their transport: a rendezvous store, say.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "api/buffer.h"
#include "api/transport.h"

namespace cccl {

// Called from any thread.
struct SideChannel {
  // As Transport::exchange. Throws DeadlineError that names the ranks that did not come.
  std::function<void(Bytes mine, MutableBytes all, std::uint64_t number, Seconds deadline)>
      exchange;
  std::function<void(const std::string& reason)> tell;  // why this rank gives up
  std::function<std::string(bool wait)> heard;  // why another did, or ""; `wait`: soon, surely
};

// Numbers of exchanges that no collective has.
inline constexpr std::uint64_t kConnecting = ~std::uint64_t{0};
inline constexpr std::uint64_t kFirstOfDirect = std::uint64_t{1} << 63;

}  // namespace cccl
