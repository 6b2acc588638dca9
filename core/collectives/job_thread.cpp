#include "collectives/job_thread.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "api/error.h"

namespace cccl {
namespace {

thread_local const void* current_state = nullptr;  // of the job thread that this is
constexpr Seconds kForever{1e9};                   // longer ones overflow the clock

[[noreturn]] void throw_closed(const std::string& reason) {
  throw ClosedError("this communicator takes no more work: " + reason +
                    ". Make a new one, on all ranks.");
}

}  // namespace

bool Work::wait(std::optional<Seconds> timeout) {
  std::unique_lock lock(mutex_);
  const auto done = [&] { return done_; };
  if (!done_ && owner_ && owner_ == current_state)
    throw Error(
        "a callback of a collective waits for a collective of the same group, which would never "
        "end: wait outside of callbacks");
  if (timeout && *timeout < kForever) {
    if (!changed_.wait_for(lock, *timeout, done)) return false;
  } else {
    changed_.wait(lock, done);
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

bool Work::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

std::exception_ptr Work::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::optional<double> Work::seconds() const {
  const std::lock_guard lock(mutex_);
  if (!done_ || error_ || !output_.begun) return std::nullopt;
  const auto whole = output_.done->seconds_since(*output_.begun);
  const auto alone = output_.before ? output_.done->seconds_since(*output_.before) : whole;
  return alone > 0 ? std::min(whole, alone) : whole;
}

void Work::finish(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  done_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

std::shared_ptr<Work> Work::finished(Output output) {
  auto work = std::make_shared<Work>();
  work->output_ = std::move(output);
  work->finish(nullptr);
  return work;
}

struct JobThread::State {
  mutable std::mutex mutex;
  std::condition_variable wake;
  std::deque<Job> jobs;
  std::string refused;
  bool running = false, stopping = false, abandoned = false;

  std::exception_ptr run(Job& job) {
    {
      const std::lock_guard lock(mutex);
      if (!abandoned) job.discard = {};
    }
    if (!job.discard) try {
        return job.run();
      } catch (...) {  // nothing may end the process
        return std::current_exception();
      }
    job.discard();
    return std::make_exception_ptr(ClosedError("the communicator was dropped by a callback"));
  }

  void serve() {
    current_state = this;
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stopping || !jobs.empty(); });
      if (jobs.empty()) return;
      Job job = std::move(jobs.front());
      jobs.pop_front();
      running = true;
      lock.unlock();
      const auto error = run(job);
      if (job.on_done) job.on_done(error);
      job.work->finish(error);
      job = {};  // its functions may own the last references: drop them without the lock
      lock.lock();
      running = false;
    }
  }
};

JobThread::JobThread() : state_(std::make_shared<State>()), process_(::getpid()) {
  thread_ = std::make_unique<std::thread>([state = state_] { state->serve(); });
}

bool JobThread::forked() const { return ::getpid() != process_; }

JobThread::~JobThread() { close(); }

void JobThread::check_open() const {
  if (const auto reason = refused(); !reason.empty()) throw_closed(reason);
}

std::shared_ptr<Work> JobThread::submit(Job job) {
  if (forked()) check_open();
  const std::lock_guard lock(state_->mutex);
  if (!state_->refused.empty()) throw_closed(state_->refused);
  auto work = job.work;
  work->owner_ = state_.get();
  work->output_ = std::move(job.output);
  state_->jobs.push_back(std::move(job));
  state_->wake.notify_all();
  return work;
}

void JobThread::refuse(const std::string& reason) {
  if (forked()) return;
  const std::lock_guard lock(state_->mutex);
  if (state_->refused.empty()) state_->refused = reason;
}

std::string JobThread::refused() const {
  if (forked()) return "it was made before a fork: its thread is not here";
  const std::lock_guard lock(state_->mutex);
  return state_->refused;
}

bool JobThread::busy() const {
  if (forked()) return false;
  const std::lock_guard lock(state_->mutex);
  return state_->running || !state_->jobs.empty();
}

void JobThread::close() {
  if (forked()) {
    (void)thread_.release();  // a thread that is not here can neither be joined nor detached
    return;
  }
  if (!thread_ || !thread_->joinable()) return;
  refuse("it was closed");
  const bool within = std::this_thread::get_id() == thread_->get_id();
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->abandoned |= within;
    state_->wake.notify_all();
  }
  within ? thread_->detach() : thread_->join();
}

}  // namespace cccl
