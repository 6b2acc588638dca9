#include "transports/nccl/nccl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "api/error.h"
#include "devices/cuda/check.h"
#include "devices/cuda/device.h"
#include "devices/cuda/queue.h"
#include "transports/direct/direct.h"
#include "transports/nccl/library.h"
#include "transports/nccl/watchdog.h"

namespace cccl::nccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kReady = std::future_status::ready;
constexpr Seconds kPatience{5}, kPostPatience{1}, kHearEvery{2};

constexpr Request kSizes = Request{1} << 63;  // in the numbers of groups of post_sizes()

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
  // No MismatchError, after which a group goes on: it cannot without a connection.
  const auto refuse = [&](const char* what, const std::string& a, const std::string& b) {
    throw ConfigError(std::string(what) + " differs: rank 0 has " + a + ", rank " +
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
    const Request group = ++groups_;  // in step with all ranks, so that they take the same lane
    if (transfers.empty()) return;
    if (!connected_) connect();
    move(transfers, group, queue);
  }

  void post_sizes(std::span<Transfer> sizes, Queue& queue) override {
    cuda::DeviceGuard guard(options_.device);
    const std::lock_guard lock(mutex_);
    refuse_after_abort();
    const Request group = kSizes | ++size_groups_;
    if (!connected_) connect();
    if (!sizes_.comm) open(sizes_, 1);  // all ranks come here in the same step
    if (!sizes.empty()) move(sizes, group, queue);
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

  Transport* direct() override {
    if (std::exchange(knows_direct_, true)) return direct_.load();
    owned_direct_ = direct::connect(
        {options_.rank, options_.size, options_.device, options_.direct, options_.deadline},
        side_channel_, [this] { check(); });
    direct_ = owned_direct_.get();
    if (aborted_ && direct_) owned_direct_->abort("");
    return direct_;
  }

  bool exchange(Bytes mine, MutableBytes all, std::uint64_t number, Seconds deadline) override {
    side_channel_.exchange(mine, all, number, deadline);
    return true;
  }

  void check() override {
    refuse_after_abort();
    if (connected_)
      if (const auto problem = first_problem(); !problem.empty()) lost(problem, true);
    // A rank that gave up may not be seen as lost: its connections may be cut.
    const auto now = Clock::now().time_since_epoch().count();
    auto last = last_heard_.load();
    if (Clock::duration(now - last) < kHearEvery) return;
    if (!last_heard_.compare_exchange_strong(last, now) || last == 0) return;
    if (const auto reason = side_channel_.heard(false); !reason.empty())
      throw PeerAbortedError(reason);
  }

  void when_it_fails(std::function<void(const std::string&)> fail) override {
    fail_ = std::move(fail);
  }

  // Who posts or connects sees that it is over and lets go, unless NCCL itself waits for peers:
  // then this interrupts it, for want of anything better.
  void abort(const std::string& reason) noexcept override {
    if (aborted_.exchange(true)) return;
    if (auto* const direct = direct_.load()) direct->abort(reason);
    try {
      side_channel_.tell(reason);
    } catch (...) {  // nobody is left to tell
    }
    try {
      const std::unique_lock posting(mutex_, kPostPatience);
      finish_all(nccl_ ? nccl_->abort : nullptr);
    } catch (...) {  // no thread to do it on
    }
  }

 private:
  void move(std::span<Transfer> transfers, Request group, Queue& queue) {
    auto& lane = lane_of(group);
    const auto event = event_of(group);
    CCCLIB_CUDA(cudaEventRecord, event, cuda::cuda_queue(queue).stream());
    CCCLIB_CUDA(cudaStreamWaitEvent, lane.stream, event, 0u);
    start(nccl_->group_start(), "ncclGroupStart", lane.comm);
    Result result = kSuccess;
    for (auto& t : transfers) {
      t.request = group;
      if (result != kSuccess) continue;  // the group must be ended nevertheless
      result = t.direction == Direction::kSend
                   ? nccl_->send(t.data, t.bytes, kUint8, t.peer, lane.comm, lane.stream)
                   : nccl_->receive(t.data, t.bytes, kUint8, t.peer, lane.comm, lane.stream);
    }
    const auto ended = nccl_->group_end();
    start(result, "a transfer", lane.comm);
    start(ended, "ncclGroupEnd", lane.comm);
    CCCLIB_CUDA(cudaEventRecord, event, lane.stream);
  }

  void make_stream(Lane& lane) {
    int lowest = 0, highest = 0;
    CCCLIB_CUDA(cudaDeviceGetStreamPriorityRange, &lowest, &highest);
    CCCLIB_CUDA(cudaStreamCreateWithPriority, &lane.stream, cudaStreamNonBlocking, highest);
    for (auto& event : lane.events)
      CCCLIB_CUDA(cudaEventCreateWithFlags, &event, cudaEventDisableTiming);
  }

  void connect() {
    const char* const blocking = std::getenv("NCCL_COMM_BLOCKING");
    if (blocking && std::string(blocking) == "0")
      throw UnsupportedError(
          "NCCL_COMM_BLOCKING=0 is set: transfers would begin whenever NCCL comes to it, and not "
          "in "
          "the order of streams. Unset it.");
    nccl_ = &library();
    Greeting mine{{}, options_.lanes, nccl_->version};
    if (options_.rank == 0) start(nccl_->get_unique_id(&mine.id), "ncclGetUniqueId", nullptr);
    std::vector<Greeting> all(static_cast<std::size_t>(options_.size));
    side_channel_.exchange(std::as_bytes(std::span(&mine, 1)),
                           std::as_writable_bytes(std::span(all)), kConnecting, options_.deadline);
    for (std::size_t rank = 1; rank < all.size(); ++rank) compare(all[0], all[rank], rank);
    // To connect must be bounded, so the first communicator is non-blocking. Those that carry
    // transfers block, as NCCL then launches at once and not in a thread that it makes each time.
    Config config = config_with(options_.max_ctas);
    complete(nccl_->init(&root_, options_.size, all[0].id, options_.rank, &config),
             "ncclCommInitRankConfig", root_);
    keep(root_);
    hello_ = cuda::allocate(options_.device, 2 * static_cast<std::size_t>(options_.size));
    lanes_.resize(static_cast<std::size_t>(std::max(1, options_.lanes)));
    for (auto& lane : lanes_) open(lane, options_.max_ctas);
    connected_ = true;
  }

  static Config config_with(int max_ctas) {
    Config config;
    if (max_ctas > 0) config.max_ctas = max_ctas;
    return config;
  }

  void open(Lane& lane, int max_ctas) {
    make_stream(lane);
    Config config = config_with(max_ctas);
    config.blocking = 1;
    complete(nccl_->split(root_, 0, options_.rank, &lane.comm, &config), "ncclCommSplit", root_);
    complete(kInProgress, "ncclCommSplit", lane.comm);
    keep(lane.comm);
    greet(lane);
  }

  void keep(Comm comm) {
    const std::lock_guard lock(comms_mutex_);
    comms_.push_back(comm);
  }

  // A byte to and from each peer: NCCL connects a pair at its first transfer, and waits for it,
  // which later must not happen (nobody would look after it, or a graph would be captured).
  void greet(const Lane& lane) {
    const Watchdog watchdog(options_.deadline, [this] {
      late_ = true;
      fail_ ? fail_(too_late()) : abort(too_late());
    });
    start(nccl_->group_start(), "ncclGroupStart", lane.comm);
    Result result = kSuccess;
    for (int peer = 0; peer < options_.size && result == kSuccess; ++peer) {
      if (peer == options_.rank) continue;
      auto* const bytes = hello_.get() + 2 * peer;
      result = nccl_->send(bytes, 1, kUint8, peer, lane.comm, lane.stream);
      if (result == kSuccess)
        result = nccl_->receive(bytes + 1, 1, kUint8, peer, lane.comm, lane.stream);
    }
    const auto ended = nccl_->group_end();
    start(result, "a first transfer", lane.comm);
    start(ended, "ncclGroupEnd", lane.comm);
  }

  Lane& lane_of(Request group) { return group & kSizes ? sizes_ : lanes_[group % lanes_.size()]; }
  cudaEvent_t event_of(Request group) {
    const Request turn = group & kSizes ? group & ~kSizes : group / lanes_.size();
    return lane_of(group).events[turn % Lane::kEvents];
  }

  std::string too_late() const {
    return "rank " + std::to_string(options_.rank) + " waited " +
           std::to_string(options_.deadline.count()) + " s to connect to the other ranks";
  }

  void refuse_after_abort() const {
    if (late_) throw DeadlineError(too_late());
    if (aborted_) throw ClosedError("this NCCL communicator was aborted");
  }

  void start(Result result, const char* call, Comm comm) {
    if (late_) refuse_after_abort();
    if (result != kSuccess && result != kInProgress) raise(result, call, comm);
  }

  // One thread alone may ask for the state of what goes on in a non-blocking communicator.
  void complete(Result result, const char* call, Comm& comm) {
    const auto deadline = options_.deadline;
    start(result, call, comm);
    const auto begun = Clock::now();
    auto heard = begun;
    for (Seconds pause{0}; result == kInProgress;
         pause = std::min(pause + Seconds(5e-6), Seconds(1e-3))) {
      refuse_after_abort();
      if (comm) {
        const Result asked = nccl_->async_error(comm, &result);
        start(asked, call, comm);
        start(result, call, comm);
        if (result == kSuccess) return;
      }
      if (Clock::now() - heard > kHearEvery) {
        heard = Clock::now();
        if (const auto reason = side_channel_.heard(false); !reason.empty())
          throw PeerAbortedError(reason);
      }
      if (Clock::now() - begun > deadline) {
        throw DeadlineError(std::string(call) + " of rank " + std::to_string(options_.rank) +
                            " waited " + std::to_string(deadline.count()) +
                            " s for the other ranks");
      }
      if (pause.count() > 0) std::this_thread::sleep_for(pause);
    }
  }

  [[noreturn]] void raise(Result result, const char* call, Comm comm) {
    refuse_after_abort();
    lost(call + (" failed: " + text_of(result, comm)), result == kRemoteError);
  }

  std::string text_of(Result result, Comm comm) const {
    const char* detail = comm ? nccl_->last_error(comm) : nullptr;
    return "NCCL " + text_of_version(nccl_->version) + " says '" + nccl_->error_text(result) + "'" +
           (detail && *detail ? std::string(" (") + detail + ")" : "");
  }

  // What NCCL noticed by itself.
  std::string first_problem() {
    const std::lock_guard lock(comms_mutex_);
    // One thread alone may ask the first, which is non-blocking: the one that connected it.
    for (const auto comm : std::span(comms_).subspan(comms_.empty() ? 0 : 1)) {
      Result state = kSuccess;
      const Result asked = nccl_->async_error(comm, &state);
      if (asked != kSuccess) state = asked;
      if (state != kSuccess && state != kInProgress)
        return "a transfer failed: " + text_of(state, comm);
    }
    return "";
  }

  // The reason of a rank that gave up says more than that it is gone.
  [[noreturn]] void lost(const std::string& problem, bool expected) {
    if (const auto reason = side_channel_.heard(expected); !reason.empty())
      throw PeerAbortedError(reason);
    throw TransportError("rank " + std::to_string(options_.rank) + ": " + problem);
  }

  // Calls `end` on each communicator, on a thread each: it waits for the device, where one
  // communicator's work waits for another's. Who calls this waits a few seconds at most.
  void finish_all(Result (*end)(Comm)) {
    std::vector<Comm> comms;
    {
      const std::lock_guard lock(comms_mutex_);
      comms.swap(comms_);
    }
    std::vector<std::future<void>> ended;
    for (const auto comm : comms) {
      std::promise<void> done;
      ended.push_back(done.get_future());
      std::thread([comm, end, done = std::move(done), device = options_.device]() mutable {
        cudaSetDevice(device);
        end(comm);
        done.set_value();
      }).detach();
    }
    const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(kPatience);
    for (const auto& one : ended) stuck_ = stuck_ | (one.wait_until(until) != kReady);
  }

  // Ranks close together what they used together; who waits in vain gives up.
  void release() noexcept {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(options_.device);
    try {
      finish_all(nccl_ ? nccl_->destroy : nullptr);
    } catch (...) {
    }
    lanes_.push_back(sizes_);
    for (auto& lane : lanes_) {
      if (stuck_) break;  // NCCL still uses them
      if (lane.stream) cudaStreamDestroy(lane.stream);
      for (const auto event : lane.events)
        if (event) cudaEventDestroy(event);
    }
    cudaSetDevice(before);
  }

  const Options options_;
  const SideChannel side_channel_;
  const Library* nccl_ = nullptr;
  std::vector<Lane> lanes_;
  Lane sizes_;  // of post_sizes(): such a message passes by what the lanes carry
  std::mutex comms_mutex_;
  std::vector<Comm> comms_;  // until they are ended; the first carries nothing
  std::shared_ptr<std::byte> hello_;
  std::function<void(const std::string&)> fail_;
  std::timed_mutex mutex_;
  Comm root_ = nullptr;  // carries nothing: the others are split from it
  Request groups_ = 0, size_groups_ = 0;
  std::atomic<bool> connected_ = false, aborted_ = false, late_ = false, stuck_ = false;
  std::atomic<Clock::rep> last_heard_ = 0;
  bool knows_direct_ = false;
  std::unique_ptr<Transport> owned_direct_;
  std::atomic<Transport*> direct_ = nullptr;
};

}  // namespace

std::shared_ptr<Transport> make_transport(const Options& options, SideChannel side_channel) {
  return std::make_shared<NcclTransport>(options, std::move(side_channel));
}

Version version() {
  const auto& found = library();
  return {found.version, found.path};
}

}  // namespace cccl::nccl
