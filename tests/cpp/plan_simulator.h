// Runs the plans of all ranks without data: a buffer holds only the name of its payload.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <vector>

#include "scheduler/plan.h"

namespace cccl::testing {

class PlanError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Traffic {
  std::vector<std::size_t> sent;  // values, per rank
};

// Transfers are rendezvous: one is done once both ends are posted, awaits block, posts do not.
// Those of a pair meet in posting order, as with a transport that has no tags. Throws PlanError,
// naming rank and operation, if a plan deadlocks, a send meets a receive of something else, a
// buffer is read or overwritten too early, or a value is not written once.
Traffic simulate(PlanArgs args);

}  // namespace cccl::testing
