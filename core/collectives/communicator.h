// One rank's end of a group. On a CPU a thread of its own runs the collectives one after the other.
// On a device the caller's thread submits them to a queue, and that thread waits for them, so that
// errors and deadlines are seen. Collectives take the given streams in turn: one's first chunks are
// on their way while another's last ones are.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/engine.h"
#include "collectives/job_thread.h"
#include "devices/cpu/platform.h"

namespace cccl {

// Longer ones overflow the clocks of transports.
inline constexpr Seconds kLongestDeadline{31.0 * 24 * 3600};

class Communicator {
 public:
  Communicator(std::shared_ptr<Transport> transport, Seconds deadline,
               std::shared_ptr<const Platform> platform = cpu_platform(),
               const std::vector<void*>& streams = {nullptr});
  virtual ~Communicator() { close(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool on_device() const { return device_.kind != DeviceKind::kCpu; }
  bool busy() const { return thread_.busy(); }  // a collective is under way or waits its turn
  std::string closed() const;                   // why no more work is taken; empty while it is
  // The same as a flag, which may outlive this.
  std::shared_ptr<const std::atomic<bool>> open() const { return open_; }

  std::exception_ptr failure() const { return engine_->first_error(); }  // that closed it

  // Returns at once, on a device after a first use (ranks agree and connect); `in` and `out` must
  // live until the work is done. `on_done` is called by the communicator's thread with the error,
  // if any, before the work counts as done. Throws ConfigError and UnsupportedError before anything
  // is sent. After a failure the output is NaN and all later calls throw ClosedError.
  std::shared_ptr<Work> submit(CollectiveCall call,
                               std::function<void(std::exception_ptr)> on_done = {});

  // Compares the named fields (Signature::kFields) with all ranks and moves no data: for calls that
  // another backend will carry. The work throws MismatchError.
  std::shared_ptr<Work> agree(const std::map<std::string, std::string>& fields);

  // Fails what is pending, tells the other ranks, and takes no more work.
  void abort(const std::string& reason) { engine_->fail(reason); }

  // Finishes what was submitted, then ends the thread. The destructor does too.
  void close() {
    *open_ = false;
    thread_.close();
  }

 protected:
  std::shared_ptr<Engine> engine_;  // the jobs' too: one may drop this communicator as it runs

 private:
  std::shared_ptr<Work> enqueue(Job job);
  void refuse_after_failure();

  int rank_, size_;
  Device device_;
  std::shared_ptr<std::atomic<bool>> open_;  // the engine's
  std::mutex launching_;                     // on a device: ranks submit in one order
  JobThread thread_;
};

}  // namespace cccl
