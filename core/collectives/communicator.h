// One rank's end of a group: runs collectives one after the other on a thread of its own.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "collectives/engine.h"
#include "collectives/job_thread.h"

namespace cccl {

// Longer ones overflow the clocks of transports.
inline constexpr Seconds kLongestDeadline{31.0 * 24 * 3600};

class Communicator {
 public:
  Communicator(std::shared_ptr<Transport> transport, Seconds deadline);
  virtual ~Communicator() { close(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool busy() const { return thread_.busy(); }  // a collective is under way or waits its turn
  std::string closed() const;                   // why no more work is taken; empty while it is

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
  void abort(const std::string& reason) { engine_->fail(reason); }

  // Finishes what was submitted, then ends the thread. The destructor does too.
  void close() { thread_.close(); }

 private:
  std::shared_ptr<Work> enqueue(Job job);

  int rank_, size_;
  std::shared_ptr<Engine> engine_;  // the jobs' too: one may drop this communicator as it runs
  JobThread thread_;
};

}  // namespace cccl
