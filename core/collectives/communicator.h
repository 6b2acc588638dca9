// One rank's end of a group: runs collectives one after the other on a thread of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "api/codec.h"
#include "api/transport.h"
#include "collectives/agreement.h"
#include "collectives/job_thread.h"
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

class Communicator {
 public:
  Communicator(std::shared_ptr<Transport> transport, Seconds deadline);
  virtual ~Communicator() { close(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  bool busy() const { return thread_.busy(); }  // a collective is under way or waits its turn
  std::string closed() const { return thread_.refused(); }  // why; empty while work is taken

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

  // Finishes what was submitted, then ends the thread. The destructor does too.
  void close() { thread_.close(); }

 private:
  std::exception_ptr run(const CollectiveCall& call,
                         std::chrono::steady_clock::time_point submitted);
  RunStats perform(const CollectiveCall& call, std::string& algorithm);
  std::exception_ptr guard(const std::string& where, const std::function<void()>& step);
  void agree_once(const Signature& signature, std::uint64_t sequence);

  std::shared_ptr<Transport> transport_;
  Seconds deadline_;
  std::unique_ptr<Queue> queue_;
  Pool pool_;
  std::vector<Signature> signatures_;         // of the last agreement
  std::unordered_set<std::uint64_t> agreed_;  // digests that all ranks have shown
  std::uint64_t sequence_ = 0;

  std::atomic<bool> failed_{false};  // by an abort: what is still queued fails too
  JobThread thread_;
};

}  // namespace cccl
