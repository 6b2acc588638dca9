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
  while (!event.done()) {
    transport.check();
    const Seconds waited = Clock::now() - begun;
    if (waited > deadline)
      throw DeadlineError("rank " + std::to_string(transport.rank()) + " waited " +
                          std::to_string(deadline.count()) + " s for the other ranks");
    // In proportion: the event is seen late by an eighth of the time that it took.
    std::this_thread::sleep_for(std::clamp(waited / 8, kFirstPause, kLongestPause));
  }
}

}  // namespace cccl
