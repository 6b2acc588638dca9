// Moves bytes between the ranks of one group. Algorithms see only this.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "api/buffer.h"
#include "api/device.h"

namespace cccl {

using Seconds = std::chrono::duration<double>;
using Request = std::uint64_t;

enum class Direction : std::uint8_t { kSend, kReceive };

struct Transfer {
  Direction direction;
  std::byte* data;
  std::size_t bytes;  // of a receive: at least what is sent; on a device, just as many
  int peer;
  std::uint32_t tag;    // of the collective: transfers of one pair and tag match in posting order
  Request request = 0;  // set by post()
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual DeviceKind device() const = 0;

  // Pipeline steps that a receive is posted before its send: 0 where both must be in one group.
  virtual std::size_t receive_ahead() const { return 1; }

  // Starts all transfers as one group, after the work that is in `queue` now; never blocks. Where
  // receive_ahead() is 0, ranks call it once per step, if need be with no transfer.
  // The memory must stay as it is until wait() returned for the request.
  virtual void post(std::span<Transfer> transfers, Queue& queue) = 0;

  // Where receive_ahead() is 0, in front of a post() whose payloads have sizes that their values
  // decide: a group of its own for these sizes, which waits for no payload in flight. If a step of
  // a collective has such a group on one rank, it has on all, if need be with no transfer.
  virtual void post_sizes(std::span<Transfer> sizes, Queue& queue) { post(sizes, queue); }

  // Later work in `queue` sees the transfers done. Throws DeadlineError, naming the peers waited
  // for, once `deadline` passed without progress, and TransportError if a peer is lost.
  virtual void wait(std::span<const Request> requests, Queue& queue, Seconds deadline) = 0;

  // Between a post() and work that does not wait for it: the transfers start before that.
  virtual void flush(Queue& /*queue*/) {}

  // A collective's last wait(), and what was received has been read.
  virtual void finish(std::span<const Request> requests, Queue& queue, Seconds deadline) {
    if (!requests.empty()) wait(requests, queue, deadline);
  }

  // A transport between the same ranks that is to be preferred for payloads of fixed size, or null.
  // All ranks ask, for the first time together.
  virtual Transport* direct() { return nullptr; }

  // Whether a transfer moves nothing: a payload is read where its sender has it. Both ends then lay
  // out memory of allocator() alike, which all ranks ask for as much of, in one order. `places`:
  // how many are going to.
  virtual bool reads_in_place() const { return false; }
  virtual std::unique_ptr<Allocator> allocator(std::size_t /*places*/) { return nullptr; }
  // What `peer` has where `mine` is in this rank's memory.
  virtual std::byte* at_peer(const std::byte* /*mine*/, int /*peer*/) const { return nullptr; }

  // Fills `all` with what each rank passes, in rank order; the host waits. `number` is equal on
  // all ranks, and new at each call. False where post() can do it: it takes host memory.
  virtual bool exchange(Bytes /*mine*/, MutableBytes /*all*/, std::uint64_t /*number*/,
                        Seconds /*deadline*/) {
    return false;
  }

  // Throws TransportError if a peer is known to be lost, or PeerAbortedError. From any thread.
  virtual void check() {}

  // Where the transport itself finds that it must give up, it calls this instead of abort().
  virtual void when_it_fails(std::function<void(const std::string& reason)> /*fail*/) {}

  // Gives up: pending and future calls fail, here at once and on the other ranks as soon as
  // they can be told; they see `reason` where the transport can carry it.
  virtual void abort(const std::string& reason) noexcept = 0;
};

}  // namespace cccl
