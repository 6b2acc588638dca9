// One rank's end of a group: runs collectives one after the other on a thread of its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
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
  std::string label;
};

// A collective under way. Thread-safe.
class Work {
 public:
  // False if it is not done after `timeout` (none: forever). Throws what the collective threw.
  bool wait(std::optional<Seconds> timeout = std::nullopt);
  bool done() const;
  std::exception_ptr error() const;

 private:
  friend class Communicator;
  void finish(std::exception_ptr error);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

class Communicator {
 public:
  Communicator(std::shared_ptr<Transport> transport, Seconds deadline);
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  bool busy() const;           // a collective is under way or waits its turn
  std::string closed() const;  // why no more work is taken; empty while it is

  // Returns at once; `in` and `out` must live until the work is done. `on_done` is called by the
  // communicator's thread with the error, if any, before the work counts as done. Throws
  // ConfigError and UnsupportedError before anything is sent. After a failure the output is NaN and
  // all later calls throw ClosedError.
  std::shared_ptr<Work> submit(CollectiveCall call,
                               std::function<void(std::exception_ptr)> on_done = {});

  // Compares the named fields (Signature::kFields) with all ranks and moves no data: for calls that
  // another backend will carry. The work throws MismatchError.
  std::shared_ptr<Work> agree(const std::map<std::string, std::string>& fields);

  // Fails what is pending, tells the other ranks, and takes no more work.
  void abort(const std::string& reason);

  // Finishes what was submitted, then ends the thread. Called by the destructor too.
  void close();

 private:
  struct Job {
    std::function<std::exception_ptr()> run;
    std::shared_ptr<Work> work;
    std::function<void(std::exception_ptr)> on_done;
  };

  std::shared_ptr<Work> enqueue(Job job);
  void serve();
  std::exception_ptr run(const CollectiveCall& call,
                         std::chrono::steady_clock::time_point submitted);
  RunStats perform(const CollectiveCall& call, std::string& algorithm);
  std::exception_ptr guard(const std::string& where, const std::function<void()>& step);
  std::exception_ptr earlier_failure() const;
  void agree_once(const Signature& signature, std::uint64_t sequence);
  void refuse_later_calls(const std::string& reason);

  std::shared_ptr<Transport> transport_;
  Seconds deadline_;
  std::unique_ptr<Queue> queue_;
  Pool pool_;
  std::vector<Signature> signatures_;         // of the last agreement
  std::unordered_set<std::uint64_t> agreed_;  // digests that all ranks have shown
  std::uint64_t sequence_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  std::string closed_;   // why, once no more work is taken
  bool failed_ = false;  // by an abort: what is still queued fails too
  bool stopping_ = false, running_ = false;
  std::thread thread_;
};

}  // namespace cccl
