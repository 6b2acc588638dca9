#include "devices/cpu/workers.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include "api/error.h"
#include "devices/cpu/float_environment.h"

namespace cccl {
namespace {

constexpr std::size_t kMostAuto = 8, kMost = 64;
// What takes a thread about as long as to hand it over.
constexpr std::size_t kPieceBytes = 256 * 1024;

std::atomic<std::size_t> chosen{0};  // 0: not looked up yet

std::size_t usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return std::max(1u, std::thread::hardware_concurrency());
}

// The number in a variable, or 0.
std::size_t number_in(const char* text) {
  std::size_t number = 0;
  const std::string_view whole(text ? text : "");
  const auto [end, error] = std::from_chars(whole.data(), whole.data() + whole.size(), number);
  return error == std::errc{} && end == whole.data() + whole.size() ? number : 0;
}

std::size_t automatic() {
  const std::size_t ranks = std::max<std::size_t>(1, number_in(std::getenv("LOCAL_WORLD_SIZE")));
  return std::clamp<std::size_t>(usable_cores() / ranks, 2, kMostAuto + 1) - 1;
}

std::size_t looked_up() {
  const char* const text = std::getenv("CCCL_CODEC_THREADS");
  if (!text || std::string_view(text) == "auto") return automatic();
  const std::size_t number = number_in(text);
  if (number < 1 || number > kMost)
    throw ConfigError("CCCL_CODEC_THREADS is '" + std::string(text) + "'; allowed: auto, or 1 to " +
                      std::to_string(kMost));
  return number;
}

// Until `done`, for less time than it takes to be woken up: the next call of a pipeline is near.
template <class Done>
bool spin(Done done) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  while (!done()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

class Workers {
 public:
  // Whether the caller has the threads to itself until it frees them.
  bool take() { return ::getpid() == process_ && !taken_.exchange(true); }
  void free() { taken_ = false; }

  void run(const Pieces& pieces, const std::function<void(std::size_t)>& work) {
    Job job{work, pieces.size()};
    bool wakes;
    {
      const std::lock_guard lock(mutex_);
      while (threads_ + 1 < std::min(codec_threads(), pieces.size()) && start()) ++threads_;
      job_ = &job;
      ++jobs_;
      wakes = asleep_ > 0;
    }
    if (wakes) wake_.notify_all();
    job.take_part();
    {
      const std::lock_guard lock(mutex_);
      job_ = nullptr;
    }
    const auto left = [&] { return job.helpers == 0; };
    if (!spin(left)) {
      std::unique_lock lock(mutex_);
      left_.wait(lock, left);
    }
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  struct Job {
    const std::function<void(std::size_t)>& work;
    std::size_t count;
    std::atomic<std::size_t> next = 0;
    std::atomic<int> helpers = 0;  // more of them under the mutex of Workers alone
    std::mutex mutex = {};
    std::exception_ptr error = nullptr;
    std::size_t failed = std::numeric_limits<std::size_t>::max();

    void take_part() {
      for (std::size_t piece; (piece = next++) < count;) {
        try {
          work(piece);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (piece < failed) error = std::current_exception();
          failed = std::min(failed, piece);
        }
      }
    }
  };

  // Threads are never joined: they sleep until the process ends. Where the system has none to
  // give, there are fewer.
  bool start() {
    try {
      std::thread([this, seen = jobs_.load()] { serve(seen); }).detach();
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  // `seen`: how many jobs came before.
  void serve(std::size_t seen) {
    const FloatEnvironment environment;
    for (;;) {
      const auto comes = [&] { return jobs_ != seen; };
      const bool soon = spin(comes);
      std::unique_lock lock(mutex_);
      ++asleep_;
      if (!soon) wake_.wait(lock, comes);
      --asleep_;
      seen = jobs_;
      Job* const job = job_;
      if (!job) continue;
      ++job->helpers;
      lock.unlock();
      job->take_part();
      if (--job->helpers > 0) continue;
      lock.lock();  // the caller may be about to wait
      left_.notify_all();
    }
  }

  const pid_t process_ = ::getpid();
  std::atomic<bool> taken_{false};
  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::atomic<std::size_t> jobs_ = 0;  // more under the mutex alone; so are these:
  std::size_t threads_ = 0, asleep_ = 0;
  Job* job_ = nullptr;
};

}  // namespace

std::size_t codec_threads() {
  if (chosen == 0) chosen = looked_up();
  return chosen;
}

void set_codec_threads(std::size_t threads) {
  if (threads > kMost)
    throw ConfigError("codec threads: " + std::to_string(threads) + "; allowed: 1 to " +
                      std::to_string(kMost) + ", or 0 for as many as fit");
  chosen = threads ? threads : automatic();
}

Pieces pieces_of(std::size_t count, std::size_t unit, std::size_t bytes) {
  const std::size_t fit = count * bytes / kPieceBytes;
  if (fit < 2 || codec_threads() == 1) return Pieces::one(count);
  const std::size_t pieces = std::min(fit, 2 * codec_threads()), units = (count + unit - 1) / unit;
  return {count, (units + pieces - 1) / pieces * unit};
}

void for_each_piece(const Pieces& pieces, const std::function<void(std::size_t piece)>& work) {
  static Workers& workers = *new Workers;  // its threads may outlive all destructors
  const auto alone = [&] {
    for (std::size_t piece = 0; piece < pieces.size(); ++piece) work(piece);
  };
  if (pieces.size() == 1 || !workers.take()) return alone();
  struct Free {
    ~Free() { workers.free(); }
  } free;
  workers.run(pieces, work);
}

}  // namespace cccl
