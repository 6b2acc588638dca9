#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "api/transport.h"

namespace cccl::nccl {

// Calls something unless it is destroyed in time.
class Watchdog {
 public:
  Watchdog(Seconds limit, std::function<void()> bark)
      : thread_([this, limit, bark = std::move(bark)] {
          std::unique_lock lock(mutex_);
          if (!changed_.wait_for(lock, limit, [this] { return over_; })) bark();
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace cccl::nccl
