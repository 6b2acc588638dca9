#include "collectives/stats.h"

namespace cccl {

void Stats::add(const StatsKey& key, const StatsRow& row) {
  const std::lock_guard lock(mutex_);
  auto& total = rows_[key];
  total.calls += row.calls;
  total.timed_calls += row.timed_calls;
  total.feedback_calls += row.feedback_calls;
  total.failures += row.failures;
  total.values += row.values;
  total.value_bytes += row.value_bytes;
  total.world_size = row.world_size;
  total.plain = row.plain;
  total.latency += row.latency;
  total.predicted += row.predicted;
  total.alternative += row.alternative;
  total.run.bytes_sent += row.run.bytes_sent;
  total.run.bytes_received += row.run.bytes_received;
  total.run.messages += row.run.messages;
  total.run.encode += row.run.encode;
  total.run.reduce += row.run.reduce;
  total.run.decode += row.run.decode;
  total.run.exposed += row.run.exposed;
  total.run.total += row.run.total;
  total.run.error_squares += row.run.error_squares;
  total.run.squares += row.run.squares;
  total.run.non_finite |= row.run.non_finite;
  total.run.noise.add(row.run.noise);
}

std::vector<std::pair<StatsKey, StatsRow>> Stats::rows() const {
  const std::lock_guard lock(mutex_);
  return {rows_.begin(), rows_.end()};
}

void Stats::reset() {
  const std::lock_guard lock(mutex_);
  rows_.clear();
}

Stats& process_stats() {
  static Stats stats;
  return stats;
}

}  // namespace cccl
