#include "transports/nccl/nccl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "api/error.h"
#include "devices/cuda/check.h"
#include "devices/cuda/queue.h"
#include "transports/nccl/library.h"

namespace cccl::nccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kConnecting = ~std::uint64_t{0};  // a number that no collective has
constexpr Seconds kAbortPatience{5}, kClosePatience{5}, kHearEvery{2};

// A communicator with its stream. A group of transfers is a number; its event is kept for a while.
struct Lane {
  static constexpr std::size_t kEvents = 64;

  Comm comm = nullptr;
  cudaStream_t stream = nullptr;
  std::array<cudaEvent_t, kEvents> events{};
  Request waited = 0;  // the latest group that the queue of `waiter` waits for
  const Queue* waiter = nullptr;
};

// What a rank tells the others before it connects; the id is rank 0's.
struct Greeting {
  UniqueId id;
  int lanes, version;
};

void compare(const Greeting& first, const Greeting& other, std::size_t rank) {
  const auto refuse = [&](const char* what, const std::string& a, const std::string& b) {
    throw MismatchError(std::string(what) + " differs: rank 0 has " + a + ", rank " +
                        std::to_string(rank) + " has " + b + ". Make it equal on all ranks.");
  };
  if (first.lanes != other.lanes)
    refuse("nccl_lanes", std::to_string(first.lanes), std::to_string(other.lanes));
  if (first.version != other.version)
    refuse("NCCL's version", text_of_version(first.version), text_of_version(other.version));
}

class NcclTransport final : public Transport {
 public:
  NcclTransport(const Options& options, SideChannel side_channel)
      : options_(options), side_channel_(std::move(side_channel)) {}

  ~NcclTransport() override { release(); }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  DeviceKind device() const override { return DeviceKind::kCuda; }
  std::size_t receive_ahead() const override { return 0; }

  void post(std::span<Transfer> transfers, Queue& queue) override {
    cuda::DeviceGuard guard(options_.device);
    const std::lock_guard lock(mutex_);
    refuse_after_abort();
    if (!connected_) connect();
    const Request group = ++groups_;
    auto& lane = lane_of(group);
    const auto event = event_of(group);
    CCCLIB_CUDA(cudaEventRecord, event, cuda::cuda_queue(queue).stream());
    CCCLIB_CUDA(cudaStreamWaitEvent, lane.stream, event, 0u);
    start(nccl_->group_start(), "ncclGroupStart", lane.comm);
    for (auto& t : transfers) {
      t.request = group;
      if (t.direction == Direction::kSend)
        start(nccl_->send(t.data, t.bytes, kUint8, t.peer, lane.comm, lane.stream), "ncclSend",
              lane.comm);
      else
        start(nccl_->receive(t.data, t.bytes, kUint8, t.peer, lane.comm, lane.stream), "ncclRecv",
              lane.comm);
    }
    complete(nccl_->group_end(), "ncclGroupEnd", lane.comm, options_.deadline);
    CCCLIB_CUDA(cudaEventRecord, event, lane.stream);
  }

  void wait(std::span<const Request> requests, Queue& queue, Seconds) override {
    cuda::DeviceGuard guard(options_.device);
    const std::lock_guard lock(mutex_);
    for (const auto group : requests) {
      auto& lane = lane_of(group);
      if (lane.waiter != &queue) lane.waited = 0;
      lane.waiter = &queue;
      // Groups of a lane end in order. An event that serves a later group by now ends later too.
      if (group <= lane.waited) continue;
      CCCLIB_CUDA(cudaStreamWaitEvent, cuda::cuda_queue(queue).stream(), event_of(group), 0u);
      lane.waited = group;
    }
  }

  bool exchange(Bytes mine, MutableBytes all, std::uint64_t number, Seconds deadline) override {
    side_channel_.exchange(mine, all, number, deadline);
    return true;
  }

  void check() override {
    if (aborted_ || !connected_) return;  // who gave up knows why
    for (const auto& lane : lanes_) {
      Result state = kSuccess;
      const Result asked = nccl_->async_error(lane.comm, &state);
      if (asked != kSuccess) state = asked;
      if (state != kSuccess && state != kInProgress) raise(state, "a transfer", lane.comm);
    }
    // A rank that gave up may not be seen as lost: its connections may be cut.
    const auto now = Clock::now().time_since_epoch().count();
    auto last = last_heard_.load();
    if (Clock::duration(now - last) < kHearEvery) return;
    if (!last_heard_.compare_exchange_strong(last, now) || last == 0) return;
    if (const auto reason = side_channel_.heard(false); !reason.empty())
      throw PeerAbortedError(reason);
  }

  // ncclCommAbort may wait for the device: it gets a thread, and who calls this a few seconds.
  void abort(const std::string& reason) noexcept override {
    if (aborted_.exchange(true)) return;
    try {
      side_channel_.tell(reason);
      // Who posts or connects sees that it is aborted, and lets go.
      const std::unique_lock lock(mutex_, kAbortPatience);
      std::vector<Comm> comms;
      for (const auto& lane : lanes_)
        if (lock && lane.comm) comms.push_back(lane.comm);
      auto done = std::make_shared<std::promise<void>>();
      const auto ended = done->get_future();
      std::thread([comms, done, abort = nccl_ ? nccl_->abort : nullptr, device = options_.device] {
        cudaSetDevice(device);
        for (const auto comm : comms) abort(comm);
        done->set_value();
      }).detach();
      stuck_ = !lock || ended.wait_for(kAbortPatience) != std::future_status::ready;
    } catch (...) {  // nobody is left to tell
    }
  }

 private:
  void make_stream(Lane& lane) {
    int lowest = 0, highest = 0;
    CCCLIB_CUDA(cudaDeviceGetStreamPriorityRange, &lowest, &highest);
    CCCLIB_CUDA(cudaStreamCreateWithPriority, &lane.stream, cudaStreamNonBlocking, highest);
    for (auto& event : lane.events)
      CCCLIB_CUDA(cudaEventCreateWithFlags, &event, cudaEventDisableTiming);
  }

  void connect() {
    nccl_ = &library();
    lanes_.resize(static_cast<std::size_t>(std::max(1, options_.lanes)));
    for (auto& lane : lanes_) make_stream(lane);
    Greeting mine{{}, options_.lanes, nccl_->version};
    if (options_.rank == 0) start(nccl_->get_unique_id(&mine.id), "ncclGetUniqueId", nullptr);
    std::vector<Greeting> all(static_cast<std::size_t>(options_.size));
    side_channel_.exchange(std::as_bytes(std::span(&mine, 1)),
                           std::as_writable_bytes(std::span(all)), kConnecting, options_.deadline);
    for (std::size_t rank = 1; rank < all.size(); ++rank) compare(all[0], all[rank], rank);
    Config config;
    if (options_.max_ctas > 0) config.max_ctas = options_.max_ctas;
    auto& first = lanes_.front().comm;
    complete(nccl_->init(&first, options_.size, all[0].id, options_.rank, &config),
             "ncclCommInitRankConfig", first, options_.deadline);
    for (std::size_t i = 1; i < lanes_.size(); ++i) {
      auto& comm = lanes_[i].comm;
      auto result = nccl_->split(first, 0, options_.rank, &comm, &config);
      complete(result, "ncclCommSplit", first, options_.deadline);
      complete(kInProgress, "ncclCommSplit", comm, options_.deadline);
    }
    connected_ = true;
  }

  Lane& lane_of(Request group) { return lanes_[group % lanes_.size()]; }
  cudaEvent_t event_of(Request group) {
    return lane_of(group).events[group / lanes_.size() % Lane::kEvents];
  }

  void refuse_after_abort() const {
    if (aborted_) throw ClosedError("this NCCL communicator was aborted");
  }

  void start(Result result, const char* call, Comm comm) {
    if (result != kSuccess && result != kInProgress) raise(result, call, comm);
  }

  // Nothing else may be submitted to the communicator meanwhile.
  void complete(Result result, const char* call, Comm& comm, Seconds deadline) {
    start(result, call, comm);
    const auto begun = Clock::now();
    for (Seconds pause{0}; result == kInProgress;
         pause = std::min(pause + Seconds(5e-6), Seconds(1e-3))) {
      if (comm) {
        const Result asked = nccl_->async_error(comm, &result);
        start(asked, call, comm);
        start(result, call, comm);
        if (result == kSuccess) return;
      }
      refuse_after_abort();
      if (Clock::now() - begun > deadline) {
        if (const auto reason = side_channel_.heard(false); !reason.empty())
          throw PeerAbortedError(reason);
        throw DeadlineError(std::string(call) + " of rank " + std::to_string(options_.rank) +
                            " waited " + std::to_string(deadline.count()) +
                            " s for the other ranks");
      }
      if (pause.count() > 0) std::this_thread::sleep_for(pause);
    }
  }

  [[noreturn]] void raise(Result result, const char* call, Comm comm) {
    const std::string text = nccl_->error_text(result);
    const char* detail = comm ? nccl_->last_error(comm) : nullptr;
    if (const auto reason = side_channel_.heard(result == kRemoteError); !reason.empty())
      throw PeerAbortedError(reason);
    throw TransportError(std::string(call) + " failed on rank " + std::to_string(options_.rank) +
                         ": NCCL " + text_of_version(nccl_->version) + " says '" + text + "'" +
                         (detail && *detail ? std::string(" (") + detail + ")" : ""));
  }

  // Whole communicators are closed together with those of the other ranks, within bounds.
  void release() noexcept {
    if (stuck_) return;  // something still uses all of this
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(options_.device);
    const auto begun = Clock::now();
    for (auto& lane : lanes_) {
      if (lane.comm && !aborted_) close(lane.comm, begun);
      if (lane.stream) cudaStreamDestroy(lane.stream);
      for (const auto event : lane.events)
        if (event) cudaEventDestroy(event);
    }
    cudaSetDevice(before);
  }

  void close(Comm comm, Clock::time_point begun) noexcept {
    Result state = connected_ ? nccl_->finalize(comm) : kRemoteError;
    while (state == kInProgress && Clock::now() - begun < kClosePatience) {
      std::this_thread::sleep_for(Seconds(1e-4));
      if (nccl_->async_error(comm, &state) != kSuccess) break;
    }
    state == kSuccess ? nccl_->destroy(comm) : nccl_->abort(comm);
  }

  const Options options_;
  const SideChannel side_channel_;
  const Library* nccl_ = nullptr;
  std::vector<Lane> lanes_;
  std::timed_mutex mutex_;
  Request groups_ = 0;
  std::atomic<bool> connected_ = false, aborted_ = false, stuck_ = false;
  std::atomic<Clock::rep> last_heard_ = 0;
};

}  // namespace

std::shared_ptr<Transport> make_transport(const Options& options, SideChannel side_channel) {
  return std::make_shared<NcclTransport>(options, std::move(side_channel));
}

Version version() {
  const auto& found = library();
  return {found.version, text_of_version(found.version), found.path};
}

}  // namespace cccl::nccl
