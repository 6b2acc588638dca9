// Chunk size, window and algorithm of a collective, where the caller left them to us.
#pragma once

#include <cstddef>
#include <optional>

#include "api/codec.h"
#include "scheduler/plan.h"

namespace cccl {

struct Tuning {
  std::size_t chunk_bytes = 0;         // of values; 0: by the payload's size
  std::size_t window = 0;              // 0: the default
  std::optional<Algorithm> algorithm;  // none: by the payload's size
};

// Completes `args` (collective, rank, size, root and counts are set). Pure: equal on all ranks.
PlanArgs tune(PlanArgs args, const Tuning& tuning, const Codec& contribution, const Codec& result,
              DType dtype, std::size_t residual_granularity = 1);

}  // namespace cccl
