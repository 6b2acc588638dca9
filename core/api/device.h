// Where work runs. A Queue is an ordered stream of work; an Event marks a point in one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "api/buffer.h"

namespace cccl {

enum class DeviceKind { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
};

// A point in a queue that other queues, or the host, can wait for.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() const = 0;
  virtual void synchronize() = 0;  // the host waits

  // Between two events of one device that are done and were recorded with `timed`.
  virtual double seconds_since(const Event& earlier) const = 0;
};

// What the work of a queue found in the payloads that it read.
struct Findings {
  std::exception_ptr damage;  // CorruptPayloadError
  bool non_finite = false;
  int origin = -1;  // first rank with a non-finite contribution, where known
};

// Work submitted to one queue runs in order. A CPU queue has run it when submit returns.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual Device device() const = 0;
  virtual std::unique_ptr<Event> record(bool timed = false) = 0;
  virtual void wait(const Event& event) = 0;  // later work here starts after `event`
  virtual void synchronize() = 0;             // throws what its work found as damage
  virtual void* native() const = 0;           // cudaStream_t on CUDA, null on a CPU

  // Of work submitted from now on, once it is done. A CPU's codecs throw, and flag headers, at
  // once.
  virtual std::function<Findings()> watch() {
    return [] { return Findings{}; };
  }
  virtual std::uint64_t capture() const { return 0; }  // into a CUDA graph: its number, else 0
};

// Memory for payloads in flight, aligned to kPayloadAlignment.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
};

// Memory that host and device see: raised by the one, read by the other.
using Flag = std::shared_ptr<std::atomic<std::uint32_t>>;

// Of a few values before and after a codec: sums of squared errors and of squares.
struct ErrorSums {
  double error_squares = 0, squares = 0;
};
class ErrorSample {
 public:
  virtual ~ErrorSample() = default;
  virtual ErrorSums sums() const = 0;  // once the queue it was taken in is past it
};

class Codec;
struct EncodeArgs;
struct ReduceArgs;
struct Residual;

// What collectives need of a device beside its codecs.
class Platform {
 public:
  virtual ~Platform() = default;
  virtual Device device() const = 0;
  virtual void enter_thread() const {}  // before a thread of ours waits for its work
  virtual std::unique_ptr<Queue> new_queue() const = 0;
  // On a caller's stream, where there are streams. new_queue_on(): with memory of its own.
  virtual std::shared_ptr<Queue> queue_on(void* stream) const = 0;
  virtual std::unique_ptr<Queue> new_queue_on(void* stream) const = 0;

  // Of memory that the work of `queue` uses: given back behind it.
  virtual std::unique_ptr<Allocator> allocator_for(Queue& queue) const = 0;
  virtual Flag new_flag() const = 0;

  // A number in a device's memory, at first 0, and what adds 1 to it: a graph counts its runs so.
  virtual std::shared_ptr<std::uint64_t> new_counter() const { return nullptr; }
  virtual void count(std::uint64_t*, Queue&) const {}

  virtual void copy(ConstValues from, Values to, Queue& queue) const = 0;

  // The 64-bit numbers at these places, in host memory once `queue` is past this.
  virtual std::shared_ptr<const std::uint64_t> read_numbers(
      std::span<const std::byte* const> places, Queue& queue) const = 0;

  // The same with 0 in place of Inf and NaN.
  virtual void copy_finite(ConstValues from, Values to, Queue& queue) const = 0;

  // Makes every value NaN, unless it is an integer: if `flag` is raised when the queue comes to it
  // or the queue's work has found damage. No flag: always.
  virtual void fill_nan(Values out, const Flag& flag, Queue& queue) const = 0;

  // codec.encode() and first.reduce_encode() of values that a residual corrects, which then keeps
  // what is lost.
  virtual std::size_t encode(const Codec& codec, const EncodeArgs& args, const Residual& residual,
                             Queue& queue) const = 0;
  virtual std::size_t reduce_encode(const Codec& first, const ReduceArgs& args, const Codec& second,
                                    const EncodeArgs& target, const Residual& residual,
                                    Queue& queue) const = 0;

  // Behind the work in `queue`; the host waits.
  virtual void read(const std::byte* from, MutableBytes to, Queue& queue) const = 0;
  virtual void write(Bytes from, std::byte* to, Queue& queue) const = 0;
  virtual void clear(MutableBytes memory, Queue& queue) const = 0;  // to zeros; nobody waits

  // Of residuals on a device. swap(): changes each Residual::swapped, unless `spoiled` says that
  // the step was not sound. spoil(): says so if `flag` is raised when the queue comes to it, or its
  // work has found damage or values that are not finite; no flag: always. No `spoiled`: nobody
  // asks.
  virtual void swap(std::span<std::uint32_t* const>, const std::uint32_t*, Queue&) const {}
  virtual void spoil(std::uint32_t*, const Flag&, Queue&) const {}

  // Encodes and decodes the first few thousand values of args.in once more, aside.
  virtual std::unique_ptr<ErrorSample> sample_error(const Codec& codec, const EncodeArgs& args,
                                                    Queue& queue) const = 0;
};

}  // namespace cccl
