#include "transports/direct/direct.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "api/error.h"
#include "devices/cuda/check.h"
#include "devices/cuda/device.h"
#include "devices/cuda/peers.h"
#include "devices/cuda/queue.h"
#include "transports/direct/lane.h"
#include "transports/direct/marks.h"

namespace cccl::direct {
namespace {

constexpr int kMostRanks = 16, kMostLanes = 1024;
constexpr std::uint64_t kRun = std::uint64_t{1} << 32;  // more groups than a collective has
constexpr int kWordsOfLane = 2 * kMostRanks + 1;        // marks of each kind, and their base
constexpr std::size_t kLeastBytes = 2 << 20;  // an allocation of its own: all of it is shared

// This rank's memory, and the same of each other rank as this process sees it.
struct Block {
  int device = 0;
  std::size_t bytes = 0;
  std::vector<std::byte*> of_ranks;
  int rank = 0;

  std::byte* mine() const { return of_ranks[rank]; }
  bool holds(const std::byte* at) const { return mine() <= at && at < mine() + bytes; }

  ~Block() {
    cuda::RelaxedCapture relaxed;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    cudaDeviceSynchronize();  // kernels read it
    for (int r = 0; r < static_cast<int>(of_ranks.size()); ++r) {
      if (!of_ranks[r] || r == rank) continue;
      cuda::remove_peer_memory(of_ranks[r]);
      cudaIpcCloseMemHandle(of_ranks[r]);
    }
    cudaFree(mine());
    cudaGetLastError();
    cudaSetDevice(before);
  }
};

// In few different sizes: what is outgrown is not given back.
std::size_t round_up(std::size_t bytes) {
  const std::size_t step = std::max(kLeastBytes, std::bit_floor(bytes) / 4);
  return (bytes + step - 1) / step * step;
}

// What a rank says of itself, and of a block that it offers.
struct Greeting {
  std::uint64_t host;
  char bus_id[24];
  std::uint32_t wanted;
};
struct Offer {
  cudaIpcMemHandle_t handle;
  std::uint64_t bytes;  // 0: it has none
};

bool is_set(const char* variable, const char* value) {
  const char* const found = std::getenv(variable);
  return found && std::string(found) == value;
}

// The same in processes that NCCL, too, takes for ones of a host.
std::uint64_t host_id() {
  std::string id;
  if (const char* const named = std::getenv("NCCL_HOSTID")) {
    id = named;
  } else {
    char name[256] = {};
    gethostname(name, sizeof name - 1);
    std::string boot;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
    id = name + boot;
  }
  std::uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
  for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash;
}

// Over NVLink, which is what this is for, or on one GPU. By PCI Express, sends are as fast.
bool reaches(int device, const char* bus_id) {
  int peer = -1, accessible = 0, atomic = 0;
  const bool known = cudaDeviceGetByPCIBusId(&peer, bus_id) == cudaSuccess;
  if (known && peer != device) {
    cudaDeviceGetP2PAttribute(&accessible, cudaDevP2PAttrAccessSupported, device, peer);
    cudaDeviceGetP2PAttribute(&atomic, cudaDevP2PAttrNativeAtomicSupported, device, peer);
  }
  cudaGetLastError();
  return known && (peer == device || (accessible && atomic));
}

class DirectTransport final : public Transport {
 public:
  DirectTransport(const Options& options, const SideChannel& side_channel,
                  std::function<void()> check)
      : options_(options),
        side_channel_(side_channel),
        check_(std::move(check)),
        given_up_(cuda::platform(options.device)->new_flag()) {}

  // All collectives have ended: only a graph's replay may still wait, for a rank that is gone.
  ~DirectTransport() override { *given_up_ = 1; }

  // Whether all ranks can.
  bool connect() {
    Greeting mine{host_id(), {}, options_.wanted && !is_set("NCCL_P2P_DISABLE", "1")};
    CCCLIB_CUDA(cudaDeviceGetPCIBusId, mine.bus_id, int{sizeof mine.bus_id}, options_.device);
    const auto all = exchange_all(mine);
    const bool near = std::ranges::all_of(
        all, [&](const Greeting& other) { return other.wanted && other.host == mine.host; });
    if (!near || options_.size > kMostRanks) return false;
    bool possible = true;
    for (const auto& other : all) possible &= reaches(options_.device, other.bus_id);
    if (!all_agree(possible)) return false;
    marks_ = share(kMostLanes * kWordsOfLane * sizeof(std::uint64_t));
    return marks_ != nullptr;
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  DeviceKind device() const override { return DeviceKind::kCuda; }
  std::size_t receive_ahead() const override { return 0; }
  bool reads_in_place() const override { return true; }

  std::unique_ptr<Allocator> allocator(std::size_t places) override {
    struct Shared final : Allocator {
      Shared(DirectTransport& of, std::size_t places) : of(of), places(places) {}
      std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
        return of.allocate(bytes, places);
      }
      DirectTransport& of;
      const std::size_t places;
    };
    return std::make_unique<Shared>(*this, places);
  }

  std::byte* at_peer(const std::byte* mine, int peer) const override {
    for (const auto& block : blocks_)
      if (block->holds(mine)) return block->of_ranks[peer] + (mine - block->mine());
    throw Error("a payload of a direct transfer does not lie in shared memory");
  }

  void post(std::span<Transfer> transfers, Queue& queue) override {
    lane_of(queue).notes.post(transfers);
  }

  // Marks are set by the kernel that waits for others, if nothing comes before it.
  void flush(Queue& queue) override {
    auto& lane = lane_of(queue);
    if (lane.notes.has_to_set()) launch(queue, lane, {});
  }

  void wait(std::span<const Request> requests, Queue& queue, Seconds) override {
    auto& lane = lane_of(queue);
    launch(queue, lane, lane.notes.wait(requests));
  }

  void finish(std::span<const Request> requests, Queue& queue, Seconds) override {
    auto& lane = lane_of(queue);
    lane.notes.finish();
    launch(queue, lane, lane.notes.wait(requests));
    lane.begins = true;
  }

  void check() override { check_(); }

  void abort(const std::string&) noexcept override { *given_up_ = 1; }

 private:
  // Queues are first used in one order on all ranks. A collective's groups go on from a base.
  struct PlacedLane {
    Lane notes;
    int index;
    bool begins = true;  // a collective
  };
  PlacedLane& lane_of(const Queue& queue) {
    const int index = static_cast<int>(lanes_.size());
    const auto [found, is_new] = lanes_.try_emplace(&queue, PlacedLane{Lane(options_.rank), index});
    if (is_new && index >= kMostLanes)
      throw UnsupportedError("direct transfers in more than " + std::to_string(kMostLanes) +
                             " queues of one group");
    return found->second;
  }

  std::uint64_t* words_of(int owner, const PlacedLane& lane) const {
    return reinterpret_cast<std::uint64_t*>(marks_->of_ranks[owner]) + lane.index * kWordsOfLane;
  }
  Marks marks_of(std::span<const Note> notes, const PlacedLane& lane) const {
    Marks marks;
    for (const auto& [owner, done, from, group] : notes)
      marks.marks[marks.count++] = {
          words_of(owner, lane) + static_cast<int>(done) * kMostRanks + from, group};
    return marks;
  }

  void launch(Queue& queue, PlacedLane& lane, std::span<const Note> awaited) const {
    cuda::DeviceGuard guard(options_.device);
    const auto to_await = marks_of(awaited, lane);
    auto to_set = marks_of(lane.notes.take_to_set(), lane);
    to_set.base = words_of(options_.rank, lane) + 2 * kMostRanks;
    to_set.advance = std::exchange(lane.begins, false) ? kRun : 0;
    if (to_set.advance || to_set.count || to_await.count)
      direct::launch(to_set, to_await, reinterpret_cast<const std::uint32_t*>(given_up_.get()),
                     options_.device, cuda::cuda_queue(queue).stream());
  }

  template <class T>
  std::vector<T> exchange_all(const T& mine) {
    std::vector<T> all(static_cast<std::size_t>(options_.size));
    try {
      side_channel_.exchange(std::as_bytes(std::span(&mine, 1)),
                             std::as_writable_bytes(std::span(all)), kFirstOfDirect + exchanges_++,
                             options_.deadline);
    } catch (...) {
      *given_up_ = 1;  // before a Block waits for what waits for others
      throw;
    }
    return all;
  }

  bool all_agree(bool can) {
    const auto all = exchange_all(static_cast<std::uint32_t>(can));
    return std::ranges::all_of(all, [](auto one) { return one != 0; });
  }

  // On a stream of its own: others may wait for ranks that wait for this one.
  static bool clear(void* memory, std::size_t bytes) {
    cudaStream_t stream = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return false;
    const bool done = cudaMemsetAsync(memory, 0, bytes, stream) == cudaSuccess &&
                      cudaStreamSynchronize(stream) == cudaSuccess;
    cudaStreamDestroy(stream);
    return done;
  }

  // Zeros. Null, on all ranks, where one could not allocate it or open another's.
  std::shared_ptr<Block> share(std::size_t bytes) {
    cuda::RelaxedCapture relaxed;
    cuda::DeviceGuard guard(options_.device);
    auto block = std::make_shared<Block>();
    block->device = options_.device;
    block->rank = options_.rank;
    block->of_ranks.resize(static_cast<std::size_t>(options_.size));
    Offer mine{};
    bytes = round_up(bytes);
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) == cudaSuccess) {
      block->of_ranks[options_.rank] = static_cast<std::byte*>(memory);
      block->bytes = bytes;
      if (clear(memory, bytes) && cudaIpcGetMemHandle(&mine.handle, memory) == cudaSuccess)
        mine.bytes = bytes;
    }
    const auto all = exchange_all(mine);
    bool ok = true;
    for (int r = 0; r < options_.size; ++r) {
      ok &= all[r].bytes == bytes;
      if (!ok || r == options_.rank) continue;
      void* theirs = nullptr;
      ok &= cudaIpcOpenMemHandle(&theirs, all[r].handle, cudaIpcMemLazyEnablePeerAccess) ==
            cudaSuccess;
      if (!theirs) continue;
      block->of_ranks[r] = static_cast<std::byte*>(theirs);
      cuda::add_peer_memory(block->of_ranks[r], bytes);
    }
    cudaGetLastError();
    return all_agree(ok) ? block : nullptr;
  }

  // Of several places that will each want as much, the first has ranks wait for each other for all.
  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::size_t places) {
    auto spare = std::ranges::find_if(spares_, [&](auto& s) { return s.size() >= bytes; });
    if (spare == spares_.end()) {
      const std::size_t each = round_up(bytes);
      const auto block = share(places * each);
      if (!block)
        throw DeviceError("a rank of this host cannot share " + std::to_string(places * each) +
                          " bytes of its GPU's memory with the others: free some, use a smaller "
                          "chunk_size, or set peer_memory to 'off'");
      blocks_.push_back(block);
      for (std::size_t i = 0; i < places; ++i) spares_.push_back({block->mine() + i * each, each});
      spare = spares_.end() - places;
    }
    const auto found = *spare;
    spares_.erase(spare);
    const auto owner =
        std::ranges::find_if(blocks_, [&](auto& b) { return b->holds(found.data()); });
    return {*owner, found.data()};
  }

  const Options options_;
  const SideChannel side_channel_;
  const std::function<void()> check_;
  const Flag given_up_;
  std::shared_ptr<Block> marks_;
  std::vector<std::shared_ptr<Block>>
      blocks_;                        // all: a peer may read what is no longer needed here
  std::vector<MutableBytes> spares_;  // parts of them that are not in use
  std::uint64_t exchanges_ = 0;
  std::map<const Queue*, PlacedLane> lanes_;
};

}  // namespace

std::unique_ptr<Transport> connect(const Options& options, const SideChannel& side_channel,
                                   std::function<void()> check) {
  cuda::DeviceGuard guard(options.device);
  auto transport = std::make_unique<DirectTransport>(options, side_channel, std::move(check));
  return transport->connect() ? std::move(transport) : nullptr;
}

}  // namespace cccl::direct
