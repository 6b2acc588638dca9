#include "groups.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "api/error.h"
#include "transports/loopback/abort.h"

namespace cccl::testing {
namespace {

enum class Kind { kStep, kSizes };

class Hub {
 public:
  Hub(int size, bool buffered) : size_(size), buffered_(buffered) {}

  int size() const { return size_; }

  void post(int rank, Kind kind, std::uint64_t number, std::span<Transfer> transfers) {
    const std::lock_guard lock(mutex_);
    abort_.check(rank);
    for (auto& transfer : transfers) {
      if (transfer.peer < 0 || transfer.peer >= size_ || transfer.peer == rank)
        throw TransportError("no such peer: " + std::to_string(transfer.peer));
      transfer.request = ++last_;
      pending_[last_] = transfer.peer;
    }
    auto& group = groups_[{kind, number, rank}];
    group.assign(transfers.begin(), transfers.end());
    for (auto& transfer : group) {
      if (!buffered_ || kind != Kind::kStep || transfer.direction != Direction::kSend) continue;
      auto& copy = copies_.emplace_back(transfer.data, transfer.data + transfer.bytes);
      transfer.data = copy.data();
      pending_.erase(transfer.request);
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank || !groups_.contains({kind, number, peer})) continue;
      match(kind, number, rank, peer);
      match(kind, number, peer, rank);
    }
    changed_.notify_all();
  }

  void wait(int rank, Request request, Seconds deadline) {
    std::unique_lock lock(mutex_);
    const auto settled = [&] { return !pending_.contains(request) || abort_; };
    if (!changed_.wait_for(lock, deadline, settled))
      throw DeadlineError("rank " + std::to_string(rank) + " waited for rank " +
                          std::to_string(pending_.at(request)));
    if (pending_.contains(request)) abort_.check(rank);
  }

  void check_from(int rank) {
    const std::lock_guard lock(mutex_);
    abort_.check(rank);
  }

  void abort(int rank, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    abort_.note(rank, reason);
    changed_.notify_all();
  }

 private:
  std::vector<Transfer> of(Kind kind, std::uint64_t number, int rank, Direction direction,
                           int peer) const {
    std::vector<Transfer> found;
    for (const auto& transfer : groups_.at({kind, number, rank}))
      if (transfer.direction == direction && transfer.peer == peer) found.push_back(transfer);
    return found;
  }

  // Both ranks have posted the group.
  void match(Kind kind, std::uint64_t number, int from, int to) {
    const auto sent = of(kind, number, from, Direction::kSend, to);
    const auto wanted = of(kind, number, to, Direction::kReceive, from);
    const auto where = std::string(kind == Kind::kSizes ? "sizes " : "group ") +
                       std::to_string(number) + ", " + std::to_string(from) + " to " +
                       std::to_string(to) + ": ";
    if (sent.size() != wanted.size())
      throw TransportError(where + std::to_string(sent.size()) + " sent, " +
                           std::to_string(wanted.size()) + " expected");
    for (std::size_t i = 0; i < sent.size(); ++i) {
      if (sent[i].bytes != wanted[i].bytes || sent[i].tag != wanted[i].tag)
        throw TransportError(where + std::to_string(sent[i].bytes) + " bytes sent, " +
                             std::to_string(wanted[i].bytes) + " expected");
      if (sent[i].bytes) std::memcpy(wanted[i].data, sent[i].data, sent[i].bytes);
      pending_.erase(sent[i].request);
      pending_.erase(wanted[i].request);
    }
  }

  const int size_;
  const bool buffered_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::tuple<Kind, std::uint64_t, int>, std::vector<Transfer>> groups_;  // by rank
  std::map<Request, int> pending_;  // to the peer waited for
  std::deque<std::vector<std::byte>> copies_;
  Request last_ = 0;
  Abort abort_;
};

class Groups final : public Transport {
 public:
  Groups(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  DeviceKind device() const override { return DeviceKind::kCpu; }
  std::size_t receive_ahead() const override { return 0; }

  void post(std::span<Transfer> transfers, Queue&) override {
    hub_->post(rank_, Kind::kStep, ++steps_, transfers);
  }
  void post_sizes(std::span<Transfer> sizes, Queue&) override {
    hub_->post(rank_, Kind::kSizes, ++sizes_, sizes);
  }
  void wait(std::span<const Request> requests, Queue&, Seconds deadline) override {
    for (const auto request : requests) hub_->wait(rank_, request, deadline);
  }
  void check() override { hub_->check_from(rank_); }
  void abort(const std::string& reason) noexcept override { hub_->abort(rank_, reason); }

 private:
  std::shared_ptr<Hub> hub_;
  int rank_;
  std::uint64_t steps_ = 0, sizes_ = 0;
};

}  // namespace

std::vector<std::shared_ptr<Transport>> make_groups(int world_size, bool buffered) {
  auto hub = std::make_shared<Hub>(world_size, buffered);
  std::vector<std::shared_ptr<Transport>> ranks;
  for (int rank = 0; rank < world_size; ++rank)
    ranks.push_back(std::make_shared<Groups>(hub, rank));
  return ranks;
}

}  // namespace cccl::testing
