#include "scheduler/pipeline.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "api/measure.h"

namespace cccl {
namespace {

std::atomic<std::size_t> pooled_bytes{0};

class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total) {}
  ~Stopwatch() {
    total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

std::size_t aligned(std::size_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

class Run {
 public:
  Run(const Plan& plan, const PipelineJob& job, Transport& transport, Queue& queue, Pool& pool)
      : plan_(plan), job_(job), transport_(transport), queue_(queue) {
    const auto dtype = job.in.dtype;
    const std::size_t most = plan.max_shard();
    contribution_bytes_ = aligned(job.contribution->max_encoded_bytes(most, dtype));
    result_bytes_ = aligned(job.result->max_encoded_bytes(most, dtype));
    slot_bytes_ = plan.args().size * (2 * contribution_bytes_ + result_bytes_);
    outstanding_.resize(plan.depth() * plan.args().size * 3);
    memory_ = pool.reserve(plan.depth() * slot_bytes_);
  }

  RunStats run() {
    {
      Stopwatch watch(stats_.total);
      for (step_ = 0; step_ < plan_.steps(); ++step_) {
        for (const auto& op : plan_.step(step_)) execute(op);
        post();
        sample_error();
      }
      for (auto& requests : outstanding_) await(requests);
      wait();
    }
    return stats_;
  }

 private:
  void execute(const Op& op) {
    if (op.kind != OpKind::kAwait) wait();
    // In the first step the link is idle: what is ready leaves before more is encoded.
    if (step_ == 0 && op.kind == OpKind::kEncode) post();
    switch (op.kind) {
      case OpKind::kReceive: return queue_transfer(Direction::kReceive, op);
      case OpKind::kSend: return queue_transfer(Direction::kSend, op);
      case OpKind::kAwait: return await(requests(op));
      case OpKind::kEncode: return encode(*job_.contribution, job_.contribution_seed, op);
      case OpKind::kPublish: return encode(*job_.result, job_.result_seed, op);
      case OpKind::kReduce: return reduce(op);
      case OpKind::kDeliver: return deliver(op);
      case OpKind::kDecode: return decode(op);
    }
  }

  std::size_t slot(const Op& op) const { return op.chunk % plan_.depth(); }

  std::byte* buffer(const Op& op, Buffer kind, int index) const {
    std::byte* at = memory_ + slot(op) * slot_bytes_;
    if (kind == Buffer::kOutgoing) return at + index * contribution_bytes_;
    at += plan_.args().size * contribution_bytes_;
    if (kind == Buffer::kContribution) return at + index * contribution_bytes_;
    return at + plan_.args().size * contribution_bytes_ + index * result_bytes_;
  }

  const Codec& codec_of(const Op& op) const {
    return op.buffer == Buffer::kResult ? *job_.result : *job_.contribution;
  }

  MutableBytes payload(const Op& op) const {
    return {buffer(op, op.buffer, op.index),
            codec_of(op).max_encoded_bytes(op.count, job_.in.dtype)};
  }

  std::vector<Request>& requests(const Op& op) {
    const std::size_t kind = static_cast<std::size_t>(op.buffer);
    return outstanding_[(slot(op) * 3 + kind) * plan_.args().size + op.index];
  }

  void queue_transfer(Direction direction, const Op& op) {
    const auto bytes = payload(op);
    posted_.push_back({direction, bytes.data(), bytes.size(), op.peer, job_.tag});
    owners_.push_back(&requests(op));
    (direction == Direction::kSend ? stats_.bytes_sent : stats_.bytes_received) += bytes.size();
    ++stats_.messages;
  }

  // One call for all transfers since the last: a frontend's lock is taken once.
  void post() {
    if (posted_.empty()) return;
    transport_.post(posted_, queue_);
    std::this_thread::yield();  // ranks that share cores all begin sending before one encodes on
    for (std::size_t i = 0; i < posted_.size(); ++i) owners_[i]->push_back(posted_[i].request);
    posted_.clear();
    owners_.clear();
  }

  void await(std::vector<Request>& requests) {
    awaited_.insert(awaited_.end(), requests.begin(), requests.end());
    requests.clear();
  }

  // For all awaited since the last time, in one call.
  void wait() {
    if (awaited_.empty()) return;
    post();
    Stopwatch watch(stats_.exposed);
    transport_.wait(awaited_, queue_, job_.deadline);
    awaited_.clear();
  }

  EncodeArgs encode_args(const Op& op, ConstValues in, std::uint64_t seed) const {
    EncodeArgs args;
    args.in = in;
    args.position = op.position;
    args.seed = seed;
    args.checksum = job_.checksum;
    args.out = payload(op);
    return args;
  }

  void encode(const Codec& codec, std::uint64_t seed, const Op& op) {
    Stopwatch watch(stats_.encode);
    const auto args = encode_args(op, job_.in.part(op.values.offset, op.values.count), seed);
    codec.encode(args, queue_);
    if (!sample_.first) sample_ = {&codec, args};
  }

  // Once, while the first chunk is on its way; its values are still those that were encoded.
  void sample_error() {
    const auto& [codec, args] = sample_;
    if (sampled_ || !codec || queue_.device().kind != DeviceKind::kCpu) return;
    sampled_ = true;
    measure_error(*codec, args, queue_, stats_.error_squares, stats_.squares);
  }

  ReduceArgs contributions(const Op& op) {
    sources_.clear();
    const auto bytes = job_.contribution->max_encoded_bytes(op.count, job_.in.dtype);
    for (int rank = 0; rank < plan_.args().size; ++rank)
      sources_.push_back({buffer(op, Buffer::kContribution, rank), bytes});
    return {sources_, job_.divisor};
  }

  void reduce(const Op& op) {
    Stopwatch watch(stats_.reduce);
    const ConstValues shape{nullptr, op.count, job_.in.dtype};
    job_.contribution->reduce_encode(contributions(op), *job_.result,
                                     encode_args(op, shape, job_.result_seed), queue_);
  }

  void deliver(const Op& op) {
    Stopwatch watch(stats_.reduce);
    const auto args = contributions(op);
    const auto out = job_.out.part(op.values.offset, op.values.count);
    job_.contribution->reduce(args, out, queue_);
    if (queue_.device().kind == DeviceKind::kCpu) stats_.non_finite |= has_non_finite(out);
    for (std::size_t rank = 0; rank < args.payloads.size(); ++rank)
      note_non_finite(args.payloads[rank], static_cast<int>(rank));
  }

  void decode(const Op& op) {
    Stopwatch watch(stats_.decode);
    job_.result->decode(payload(op), job_.out.part(op.values.offset, op.values.count), queue_);
    note_non_finite(payload(op), -1);
  }

  // Reads a header that a codec has just checked.
  void note_non_finite(Bytes payload, int rank) {
    if (queue_.device().kind != DeviceKind::kCpu) return;
    PayloadHeader header;
    std::memcpy(&header, payload.data(), sizeof header);
    if (!(header.flags & kHasNonFinite)) return;
    stats_.non_finite = true;
    const int origin = header.origin ? static_cast<int>(header.origin) - 1 : rank;
    if (origin >= 0 && (stats_.origin < 0 || origin < stats_.origin)) stats_.origin = origin;
  }

  const Plan& plan_;
  const PipelineJob& job_;
  Transport& transport_;
  Queue& queue_;
  std::byte* memory_;
  std::size_t contribution_bytes_, result_bytes_, slot_bytes_;
  std::vector<std::vector<Request>> outstanding_;  // per buffer
  std::vector<Transfer> posted_;
  std::vector<std::vector<Request>*> owners_;  // of posted_, in its order
  std::vector<Bytes> sources_;
  std::vector<Request> awaited_;
  std::pair<const Codec*, EncodeArgs> sample_;
  bool sampled_ = false;
  std::size_t step_ = 0;
  RunStats stats_;
};

}  // namespace

Pool::~Pool() { pooled_bytes -= bytes_; }

std::byte* Pool::reserve(std::size_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    memory_ = allocator_->allocate(bytes);
    pooled_bytes += bytes - bytes_;
    bytes_ = bytes;
  }
  return memory_.get();
}

std::size_t Pool::process_bytes() { return pooled_bytes; }

RunStats run_pipeline(const Plan& plan, const PipelineJob& job, Transport& transport, Queue& queue,
                      Pool& pool) {
  return Run(plan, job, transport, queue, pool).run();
}

}  // namespace cccl
