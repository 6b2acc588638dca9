// Runs jobs one after the other on a thread of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "api/device.h"
#include "api/noise.h"
#include "api/transport.h"

namespace cccl {

// Where a job's output is made on a device: there once `done` is, well before the work is done; and
// the stream. Null on a CPU. `begun`, of a timed job, and `before`, the end of the one before it.
// `noise`, where it is measured: there once the job is done.
struct Output {
  std::shared_ptr<const Event> done;
  void* stream = nullptr;
  std::shared_ptr<const Event> begun, before;
  std::shared_ptr<const Noise> noise;
};

// A job under way. Thread-safe.
class Work {
 public:
  // False if it is not done after `timeout` (none: forever). Throws what the job threw, and Error
  // on the thread that would have to run the job.
  bool wait(std::optional<Seconds> timeout = std::nullopt);
  bool done() const;
  std::exception_ptr error() const;

  // On the device, of a timed job that ended well. It begins with the job before it still under
  // way: from that one's end on, the link was its own.
  std::optional<double> seconds() const;

  void finish(std::exception_ptr error);
  static std::shared_ptr<Work> finished(Output output = {});

  const Output& output() const { return output_; }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
  friend class JobThread;
  const void* owner_ = nullptr;  // the thread's state
  Output output_;
};

struct Job {
  std::function<std::exception_ptr()> run;
  std::function<void()> discard = {};  // instead of run, if the thread's owner is gone
  std::function<void(std::exception_ptr)> on_done = {};  // with the error, before the work is done
  Output output = {};                                    // Work::output() of `work`
  std::shared_ptr<Work> work = std::make_shared<Work>();
};

class JobThread {
 public:
  JobThread();
  ~JobThread();
  JobThread(const JobThread&) = delete;
  JobThread& operator=(const JobThread&) = delete;

  // Throws ClosedError after refuse().
  std::shared_ptr<Work> submit(Job job);

  // Takes no more jobs; the first reason stays.
  void refuse(const std::string& reason);
  void check_open() const;      // throws as submit() does
  std::string refused() const;  // empty while jobs are taken

  bool busy() const;  // a job runs or waits its turn

  // Finishes what was submitted and ends the thread. From within a job (its callback dropped the
  // last owner), the jobs behind it fail instead. In a fork there is no thread: nothing is done.
  void close();

 private:
  struct State;
  bool forked() const;  // this process is a fork of the one that has the thread

  std::shared_ptr<State> state_;  // the thread's too: it may outlive this object
  std::unique_ptr<std::thread> thread_;
  long process_;
};

}  // namespace cccl
