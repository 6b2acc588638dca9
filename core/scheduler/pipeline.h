// Runs a plan: codecs on a queue, payloads over a transport, buffers from a pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "api/codec.h"
#include "api/device.h"
#include "api/transport.h"
#include "scheduler/plan.h"

namespace cccl {

// One block of memory that grows to what the largest plan needs and is used again by every call.
class Pool {
 public:
  explicit Pool(std::shared_ptr<Allocator> allocator) : allocator_(std::move(allocator)) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::byte* reserve(std::size_t bytes);
  static std::size_t process_bytes();  // of all pools of this process

 private:
  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<std::byte> memory_;
  std::size_t bytes_ = 0;
};

struct PipelineJob {
  ConstValues in;
  Values out;
  const Codec* contribution;
  const Codec* result;
  double divisor = 1;
  std::uint64_t contribution_seed = 0, result_seed = 0;
  bool checksum = true;
  std::uint32_t tag = 0;
  Seconds deadline{0};
};

// What one run moved and where its time went. Times in seconds of the thread that drives it.
struct RunStats {
  std::uint64_t bytes_sent = 0, bytes_received = 0, messages = 0;
  double encode = 0, reduce = 0, decode = 0, exposed = 0, total = 0;
  // Of a sample of the first payload: sum of squared errors and of squares. 0 / 0 where there is
  // none.
  double error_squares = 0, squares = 0;
  bool non_finite = false;
  int origin = -1;  // first rank with a non-finite contribution, where known
};

RunStats run_pipeline(const Plan& plan, const PipelineJob& job, Transport& transport, Queue& queue,
                      Pool& pool);

}  // namespace cccl
