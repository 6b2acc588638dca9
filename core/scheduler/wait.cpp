#include "scheduler/wait.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "api/error.h"

namespace cccl {

void wait_on_host(const Event& event, Transport& transport, Seconds deadline) {
  using Clock = std::chrono::steady_clock;
  constexpr Seconds kFirstPause{20e-6}, kLongestPause{1e-3};
  const auto begun = Clock::now();
  for (auto pause = kFirstPause; !event.done(); pause = std::min(2 * pause, kLongestPause)) {
    transport.check();
    if (Clock::now() - begun > deadline)
      throw DeadlineError("rank " + std::to_string(transport.rank()) + " waited " +
                          std::to_string(deadline.count()) + " s for the other ranks");
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace cccl
