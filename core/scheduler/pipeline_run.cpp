// What is known of a run before it begins, and once its work is done.
#include "scheduler/pipeline.h"

namespace cccl {

bool sends_any_size(const PlanArgs& plan, const Codec& contribution, const Codec& result) {
  const bool sums =
      plan.collective == Collective::kAllReduce || plan.collective == Collective::kReduceScatter;
  const bool collects =
      plan.collective != Collective::kReduceScatter && plan.algorithm != Algorithm::kOneShot;
  return (sums && !contribution.info().fixed_size) || (collects && !result.info().fixed_size);
}

void PipelineRun::settle() {
  for (const auto& [field, begin, end] : spans) stats.*field += end->seconds_since(*begin);
  spans.clear();
  for (const auto& [numbers, counts] : statistics)
    for (std::size_t i = 0; i < counts.size(); ++i) stats.noise.add(numbers.get()[i], counts[i]);
  statistics.clear();
  if (!sample) return;
  const auto [error_squares, squares] = sample->sums();
  stats.error_squares += error_squares;
  stats.squares += squares;
  sample.reset();
}

}  // namespace cccl
