#include "in_place.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "api/error.h"
#include "devices/cpu/platform.h"
#include "devices/cpu/queue.h"
#include "groups.h"
#include "transports/direct/lane.h"
#include "transports/loopback/abort.h"

namespace cccl::testing {
namespace {

using direct::Done;
using direct::Note;

// What all ranks see: their blocks of memory, in the order of allocation, and notes.
class Hub {
 public:
  explicit Hub(int size) : blocks_(size) {}

  int size() const { return static_cast<int>(blocks_.size()); }

  std::shared_ptr<std::byte> allocate(int rank, std::size_t bytes) {
    CpuQueue queue;
    auto memory = cpu_platform()->allocator_for(queue)->allocate(bytes);
    std::unique_lock lock(mutex_);
    const std::size_t number = blocks_[rank].size();
    blocks_[rank].push_back({memory, bytes});
    changed_.notify_all();
    await(lock, rank, Seconds{60}, "an allocation", [&] {
      return std::ranges::all_of(blocks_, [&](const auto& of) { return of.size() > number; });
    });
    for (const auto& of : blocks_)
      if (of[number].bytes != bytes) throw TransportError("ranks allocate different sizes");
    return memory;
  }

  std::byte* at_peer(int rank, const std::byte* mine, int peer) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = blocks_[rank].size(); i-- > 0;) {
      const auto& [memory, bytes] = blocks_[rank][i];
      if (memory.get() <= mine && mine < memory.get() + bytes)
        return blocks_[peer][i].memory.get() + (mine - memory.get());
    }
    throw TransportError("not in shared memory");
  }

  // All ranks come to this together.
  void meet(int rank) {
    std::unique_lock lock(mutex_);
    ++met_;
    changed_.notify_all();
    await(lock, rank, Seconds{5}, "the others to meet", [&] { return met_ >= size(); });
  }

  void set(const Note& note) {
    const std::lock_guard lock(mutex_);
    auto& group = groups_[{note.owner, note.done, note.from}];
    if (note.group < group) throw TransportError("a note goes back");
    group = note.group;
    changed_.notify_all();
  }

  void await(const Note& note, Seconds deadline) {
    std::unique_lock lock(mutex_);
    await(lock, note.owner, deadline, "rank " + std::to_string(note.from),
          [&] { return groups_[{note.owner, note.done, note.from}] >= note.group; });
  }

  void abort(int rank, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    abort_.note(rank, reason);
    changed_.notify_all();
  }

 private:
  struct Block {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes;
  };

  template <class Condition>
  void await(std::unique_lock<std::mutex>& lock, int rank, Seconds deadline,
             const std::string& what, Condition done) {
    if (!changed_.wait_for(lock, deadline, [&] { return done() || abort_; }))
      throw DeadlineError("rank " + std::to_string(rank) + " waited for " + what);
    if (!done()) abort_.check(rank);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<Block>> blocks_;
  std::map<std::tuple<int, Done, int>, std::uint64_t> groups_;
  int met_ = 0;
  Abort abort_;
};

class Direct final : public Transport {
 public:
  Direct(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank), lane_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  DeviceKind device() const override { return DeviceKind::kCpu; }
  std::size_t receive_ahead() const override { return 0; }
  bool reads_in_place() const override { return true; }
  std::byte* at_peer(const std::byte* mine, int peer) const override {
    return hub_->at_peer(rank_, mine, peer);
  }
  std::unique_ptr<Allocator> allocator(std::size_t) override {
    struct Shared final : Allocator {
      Shared(Hub& hub, int rank) : hub(hub), rank(rank) {}
      std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
        return hub.allocate(rank, bytes);
      }
      Hub& hub;
      int rank;
    };
    return std::make_unique<Shared>(*hub_, rank_);
  }

  void post(std::span<Transfer> transfers, Queue&) override { lane_.post(transfers); }
  void flush(Queue&) override {
    for (const auto& note : lane_.take_to_set()) hub_->set(note);
  }
  void wait(std::span<const Request> requests, Queue& queue, Seconds deadline) override {
    flush(queue);
    for (const auto& note : lane_.wait(requests)) hub_->await(note, deadline);
  }
  void finish(std::span<const Request> requests, Queue& queue, Seconds deadline) override {
    lane_.finish();
    wait(requests, queue, deadline);
  }
  void abort(const std::string& reason) noexcept override { hub_->abort(rank_, reason); }

 private:
  std::shared_ptr<Hub> hub_;
  int rank_;
  direct::Lane lane_;
};

class Near final : public Transport {
 public:
  Near(std::shared_ptr<Transport> groups, std::shared_ptr<Hub> hub)
      : groups_(std::move(groups)), hub_(std::move(hub)), direct_(hub_, groups_->rank()) {}

  int rank() const override { return groups_->rank(); }
  int size() const override { return groups_->size(); }
  DeviceKind device() const override { return DeviceKind::kCpu; }
  std::size_t receive_ahead() const override { return 0; }
  Transport* direct() override {
    if (!std::exchange(met_, true)) hub_->meet(rank());
    return &direct_;
  }

  void post(std::span<Transfer> transfers, Queue& queue) override {
    groups_->post(transfers, queue);
  }
  void post_sizes(std::span<Transfer> sizes, Queue& queue) override {
    groups_->post_sizes(sizes, queue);
  }
  void wait(std::span<const Request> requests, Queue& queue, Seconds deadline) override {
    groups_->wait(requests, queue, deadline);
  }
  void check() override { groups_->check(); }
  void abort(const std::string& reason) noexcept override {
    direct_.abort(reason);
    groups_->abort(reason);
  }

 private:
  std::shared_ptr<Transport> groups_;
  std::shared_ptr<Hub> hub_;
  Direct direct_;
  bool met_ = false;
};

}  // namespace

std::vector<std::shared_ptr<Transport>> make_in_place(int world_size) {
  auto hub = std::make_shared<Hub>(world_size);
  std::vector<std::shared_ptr<Transport>> ranks;
  for (auto& groups : make_groups(world_size))
    ranks.push_back(std::make_shared<Near>(std::move(groups), hub));
  return ranks;
}

}  // namespace cccl::testing
