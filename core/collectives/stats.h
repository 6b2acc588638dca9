// What went over the wire and what it cost, per tensor label, for the whole process.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "scheduler/pipeline.h"

namespace cccl {

// One line of the report: all calls of a collective with the same label, codecs and dtype.
struct StatsKey {
  std::string label, collective, codecs, algorithm, dtype;
  std::string reason;  // why it went plain
  std::string leg;     // of a hierarchical collective
  auto operator<=>(const StatsKey&) const = default;
};

struct StatsRow {
  std::uint64_t calls = 0, timed_calls = 0;  // timed: those of which `run` has times and an error
  std::uint64_t feedback_calls = 0;          // with error feedback
  std::uint64_t failures = 0, values = 0, value_bytes = 0;
  int world_size = 0;
  bool plain = false;
  double latency = 0;  // submission to completion
  // Seconds that a policy expected of these calls, and of the best other way; 0 without a policy.
  double predicted = 0, alternative = 0;
  RunStats run;  // sums over the calls
};

class Stats {
 public:
  void add(const StatsKey& key, const StatsRow& row);
  std::vector<std::pair<StatsKey, StatsRow>> rows() const;
  void reset();

 private:
  mutable std::mutex mutex_;
  std::map<StatsKey, StatsRow> rows_;
};

Stats& process_stats();

}  // namespace cccl
