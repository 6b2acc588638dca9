// What a communicator's thread does: agreement, plan, pipeline, statistics, and giving up.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "api/codec.h"
#include "api/transport.h"
#include "collectives/agreement.h"
#include "collectives/stats.h"
#include "collectives/tuning.h"
#include "scheduler/pipeline.h"

namespace cccl {

struct CollectiveCall {
  Collective collective = Collective::kAllReduce;
  ConstValues in;  // may be `out` itself
  Values out;
  bool average = true;
  int root = 0;
  std::vector<std::size_t> counts;                    // per rank, for reduce_scatter and all_gather
  std::shared_ptr<const Codec> contribution, result;  // one per leg
  Tuning tuning;
  std::uint64_t seed = 0;
  bool checksum = true;
  bool raise_non_finite = false;
  std::optional<Seconds> deadline;  // of each wait; none: the communicator's
  std::string label;
  double predicted = 0, alternative = 0;  // seconds, for the statistics
};

inline bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
}

// All methods but fail() and failure() are for one thread.
class Engine {
 public:
  Engine(std::shared_ptr<Transport> transport, Seconds deadline);

  // The error, if any; the output is then NaN. After a failure everything fails.
  std::exception_ptr run(const CollectiveCall& call,
                         std::chrono::steady_clock::time_point submitted);
  std::exception_ptr agree(const Signature& signature);

  // Gives up, here and on the other ranks; the first reason stays.
  void fail(const std::string& reason);
  std::string failure() const;  // empty while all is well

 private:
  RunStats perform(const CollectiveCall& call, std::string& algorithm);
  std::exception_ptr guard(const std::string& where, const std::function<void()>& step);
  // Returns the signature's digest.
  std::uint64_t agree_once(const Signature& signature, std::uint64_t sequence, Seconds deadline);

  Seconds deadline_;
  std::unique_ptr<Queue> queue_;
  Pool pool_;
  std::vector<Signature> signatures_;         // of the last agreement
  std::unordered_set<std::uint64_t> agreed_;  // digests that all ranks have shown, the latest
  std::uint64_t sequence_ = 0;
  mutable std::mutex mutex_;
  std::string failure_;
  std::shared_ptr<Transport> transport_;  // last, so that it goes before the memory it reads
};

}  // namespace cccl
