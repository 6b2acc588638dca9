#include "transports/loopback/loopback.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "api/error.h"
#include "transports/loopback/abort.h"

namespace cccl {
namespace {

class Hub {
 public:
  explicit Hub(int size) : size_(size) {}

  int size() const { return size_; }

  void post(int rank, Transfer& transfer) {
    if (transfer.peer < 0 || transfer.peer >= size_ || transfer.peer == rank)
      throw TransportError("rank " + std::to_string(rank) + " cannot reach peer " +
                           std::to_string(transfer.peer));
    const std::lock_guard lock(mutex_);
    abort_.check(rank);
    const bool sends = transfer.direction == Direction::kSend;
    const int from = sends ? rank : transfer.peer, to = sends ? transfer.peer : rank;
    transfer.request = ++last_;
    pending_[last_] = transfer.peer;
    auto& [sent, wanted] = channels_[{from, to, transfer.tag}];
    (sends ? sent : wanted).push_back(transfer);
    while (!sent.empty() && !wanted.empty()) {
      const auto out = sent.front(), in = wanted.front();
      sent.pop_front();
      wanted.pop_front();
      if (out.bytes > in.bytes)
        throw TransportError("rank " + std::to_string(from) + " sent " + std::to_string(out.bytes) +
                             " bytes where rank " + std::to_string(to) + " expected " +
                             std::to_string(in.bytes));
      if (out.bytes) std::memcpy(in.data, out.data, out.bytes);
      pending_.erase(out.request);
      pending_.erase(in.request);
      changed_.notify_all();
    }
    if (sent.empty() && wanted.empty()) channels_.erase({from, to, transfer.tag});
  }

  void wait(int rank, Request request, Seconds deadline) {
    std::unique_lock lock(mutex_);
    const auto settled = [&] { return !pending_.contains(request) || abort_; };
    if (!changed_.wait_for(lock, deadline, settled))
      throw DeadlineError("rank " + std::to_string(rank) + " waited " +
                          std::to_string(deadline.count()) + " s for rank " +
                          std::to_string(pending_.at(request)));
    if (pending_.contains(request)) abort_.check(rank);
  }

  void abort(int rank, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    abort_.note(rank, reason);
    changed_.notify_all();
  }

 private:
  struct Channel {
    std::deque<Transfer> sent, wanted;
  };

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::tuple<int, int, std::uint32_t>, Channel> channels_;
  std::unordered_map<Request, int> pending_;  // to the peer waited for
  Request last_ = 0;
  Abort abort_;
};

class Loopback final : public Transport {
 public:
  Loopback(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  DeviceKind device() const override { return DeviceKind::kCpu; }

  void post(std::span<Transfer> transfers, Queue&) override {
    for (auto& transfer : transfers) hub_->post(rank_, transfer);
  }

  void wait(std::span<const Request> requests, Queue&, Seconds deadline) override {
    for (const auto request : requests) hub_->wait(rank_, request, deadline);
  }

  void abort(const std::string& reason) noexcept override {
    try {
      hub_->abort(rank_, reason);
    } catch (...) {  // out of memory for the text: the ranks still meet their deadlines
    }
  }

 private:
  std::shared_ptr<Hub> hub_;
  int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Transport>> make_loopback(int world_size) {
  if (world_size < 1)
    throw ConfigError("world_size = " + std::to_string(world_size) + "; allowed: 1 or more");
  auto hub = std::make_shared<Hub>(world_size);
  std::vector<std::shared_ptr<Transport>> ranks;
  for (int rank = 0; rank < world_size; ++rank)
    ranks.push_back(std::make_shared<Loopback>(hub, rank));
  return ranks;
}

}  // namespace cccl
