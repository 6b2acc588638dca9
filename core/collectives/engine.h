// What a communicator's thread does: agreement, plan, pipeline, statistics, and giving up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "api/codec.h"
#include "api/transport.h"
#include "collectives/agreement.h"
#include "collectives/state.h"
#include "collectives/stats.h"
#include "collectives/tuning.h"
#include "scheduler/pipeline.h"

namespace cccl {

struct CollectiveCall {
  Collective collective = Collective::kAllReduce;
  ConstValues in;  // may be `out` itself
  Values out;      // empty where a send begins
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
  std::string leg;                        // of a hierarchical collective, for the statistics
  double predicted = 0, alternative = 0;  // seconds, for the statistics
  void* stream = nullptr;                 // the caller's, where the device has streams
  bool debug = false;                     // the host waits for, and checks, every step
  std::shared_ptr<Noise> noise;           // takes that of an all_reduce; null: it is not measured
  RangeObserver observer = nullptr;

  // Error feedback of a reducing collective, and the step that it is part of (0: none is known).
  std::shared_ptr<StateStore> store;
  std::shared_ptr<const Layout> layout;
  FeedbackSettings feedback;
  std::uint64_t step = 0;
};

// Whether its codecs are to use the last mean as a prediction.
bool predicts(const CollectiveCall& call);

// Which legs have feedback: those that there are and that lose something.
FeedbackSettings feedback_of(const CollectiveCall& call);

inline bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
}

// A collective whose work may still be under way on its queue.
struct Launched {
  CollectiveCall call;
  std::chrono::steady_clock::time_point submitted;
  std::string algorithm = "none";
  PipelineRun run;
  bool timed = false;
  std::exception_ptr error;  // of the launch
  std::shared_ptr<TensorState> state;
  std::shared_ptr<const Codec> contribution, result;  // with a prediction, if they use one
  std::shared_ptr<Event> begin, end;                  // of its work; no `end`: the device failed
  std::shared_ptr<Event> before;                      // end of the collective before it
  Queue* queue = nullptr;
  std::function<Findings()> findings;
  bool captured = false;  // into a graph: its work runs whenever that is launched
};

// launch() for one thread at a time, in the ranks' common order; finish() too, in the same order.
class Engine {
 public:
  Engine(std::shared_ptr<Transport> transport, std::shared_ptr<const Platform> platform,
         Seconds deadline, const std::vector<void*>& streams);
  ~Engine();

  // Submits the work, behind that of the caller's stream. On a CPU it is then done.
  Launched launch(const CollectiveCall& call, std::chrono::steady_clock::time_point submitted);

  // Waits for the work. The error, if any; the output is then NaN. After a failure all else fails.
  std::exception_ptr finish(Launched launched);

  std::exception_ptr agree(const Signature& signature);

  // Makes the output of a call that will not run NaN.
  void discard(Values out) { platform_->fill_nan(out, {}, *eager_.front().queue); }

  // Gives up, here and on the other ranks; the first reason stays.
  void fail(const std::string& reason, std::exception_ptr error = nullptr);
  std::string failure() const;  // empty while all is well
  std::exception_ptr first_error() const;

  // False after a failure, and once no more work is taken. May outlive the engine.
  const std::shared_ptr<std::atomic<bool>>& open() const { return open_; }

 private:
  // Where a collective's work runs, and what the last one there read and wrote.
  struct Workplace {
    std::unique_ptr<Queue> queue;
    std::unique_ptr<Pool> pool, shared;  // `shared`: of what other ranks read in place
    ConstValues in, out;
    std::shared_ptr<Event> end, end_before;  // of the last one and of the one before
  };
  Workplace workplace_on(std::unique_ptr<Queue> queue) const;
  // The next in turn, behind collectives on the same memory.
  Workplace& take_workplace(const CollectiveCall& call);
  struct Captured {  // a graph's
    std::unique_ptr<Queue> queue;
    std::shared_ptr<std::uint64_t> runs;
    std::unique_ptr<Pool> shared;
  };
  Captured& place_of_capture(std::uint64_t capture);
  Transport* direct_for(const CollectiveCall& call, std::uint64_t capture);
  void perform(Launched& launched);
  std::exception_ptr guard(const std::string& where, const std::function<void()>& step);
  // Returns the signature's digest.
  std::uint64_t agree_once(const Signature& signature, std::uint64_t sequence, Seconds deadline,
                           bool capturing = false);
  void await(Launched& launched);
  void settle(Launched& launched);  // of work that is done

  const std::uint64_t number_;  // of all engines of this process
  Seconds deadline_;
  std::shared_ptr<const Platform> platform_;
  Flag failed_;                   // what is still on its way then becomes NaN
  std::vector<Workplace> eager_;  // taken in turn
  // Graphs replay at any time: what they use is theirs alone.
  std::map<std::uint64_t, Captured> captured_;
  std::size_t turn_ = 0;
  std::shared_ptr<Event> last_end_;           // of what was launched last
  std::vector<Signature> signatures_;         // of the last agreement
  std::unordered_set<std::uint64_t> agreed_;  // digests that all ranks have shown, the latest
  std::uint64_t sequence_ = 0;
  mutable std::mutex mutex_;
  std::string failure_;
  std::exception_ptr first_error_;
  const std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(true);
  std::shared_ptr<Transport> transport_;  // last, so that it goes before the memory it reads
};

}  // namespace cccl
