#include "scheduler/pipeline.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "api/error.h"
#include "api/measure.h"
#include "scheduler/sizes.h"
#include "scheduler/slots.h"
#include "scheduler/wait.h"

namespace cccl {
namespace {

class Run {
 public:
  Run(const Plan& plan, const PipelineJob& job, Transport& transport, const Platform& platform,
      Queue& queue, Pool& pool)
      : plan_(plan),
        job_(job),
        transport_(transport),
        platform_(platform),
        queue_(queue),
        on_host_(queue.device().kind == DeviceKind::kCpu),
        grouped_(transport.receive_ahead() == 0),
        any_size_(grouped_ && sends_any_size(plan.args(), *job.contribution, *job.result)),
        slots_(plan, *job.contribution, *job.result, job.in.dtype, pool),
        sizes_{transport, platform, queue, job.deadline, job.earlier} {}

  PipelineRun run() {
    measure(&RunStats::total, nullptr, [&] {
      for (step_ = 0; step_ < plan_.steps(); ++step_) {
        const auto ops = plan_.step(step_);
        grouped_ ? execute_as_group(ops) : execute_in_order(ops);
        sample_error();
        if (job_.debug) check_step();
      }
      for (auto& requests : slots_.all_requests()) await(requests);
      if (!grouped_) post();
      measure(&RunStats::exposed, nullptr,
              [&] { transport_.finish(awaited_, queue_, job_.deadline); });
    });
    return std::move(run_);
  }

 private:
  void execute_in_order(std::span<const Op> ops) {
    for (const auto& op : ops) {
      if (op.kind != OpKind::kAwait) wait();
      // In the first step the link is idle: what is ready leaves before more is encoded.
      if (step_ == 0 && op.kind == OpKind::kEncode) post();
      execute(op);
      run_batches();
    }
    post();
  }

  // A step is one group. Where the host must learn sizes for it, what this rank has yet to decode
  // does not hold it up.
  void execute_as_group(std::span<const Op> ops) {
    std::size_t n = ops.size();
    if (any_size_) {
      const auto moves = [](const Op& op) {
        return op.kind == OpKind::kSend || op.kind == OpKind::kReceive;
      };
      while (n > 0 && !moves(ops[n - 1])) --n;
      while (0 < n && n < ops.size() && ops[n].chunk == ops[n - 1].chunk) ++n;
    }
    execute_together(ops.first(n));
    post();
    execute_together(ops.subspan(n));
  }

  // On a device each submission costs the host: what is done with one chunk, a run of operations,
  // waits once, and its payloads are encoded or decoded at once.
  void execute_together(std::span<const Op> ops) {
    while (!ops.empty()) {
      std::size_t n = 0;
      while (n < ops.size() && ops[n].chunk == ops[0].chunk) ++n;
      const auto of_chunk = ops.first(n);
      for (const auto& op : of_chunk)
        if (op.kind == OpKind::kAwait) execute(op);
      wait();
      for (const auto& op : of_chunk)
        if (op.kind != OpKind::kAwait) execute(op);
      run_batches();
      ops = ops.subspan(n);
    }
  }

  void execute(const Op& op) {
    switch (op.kind) {
      case OpKind::kReceive: return queue_transfer(Direction::kReceive, op);
      case OpKind::kSend: return queue_transfer(Direction::kSend, op);
      case OpKind::kAwait: return await(slots_.requests(op));
      case OpKind::kEncode: return encode(*job_.contribution, job_.contribution_seed, op);
      case OpKind::kPublish: return encode(*job_.result, job_.result_seed, op);
      case OpKind::kReduce: return reduce(op);
      case OpKind::kDeliver: return deliver(op);
      case OpKind::kDecode: return decode(op);
    }
  }

  // A payload as it is in its buffer: shorter than the buffer where the codec found little to say.
  // What its header claims, the codec checks.
  MutableBytes content(MutableBytes buffer, const Codec& codec) const {
    if (codec.info().fixed_size || !on_host_) return buffer;
    const auto most = buffer.size() - sizeof(PayloadHeader);
    const auto body = std::min<std::size_t>(header_of(buffer).body_bytes, most);
    return buffer.first(sizeof(PayloadHeader) + body);
  }

  // The sender's buffer, of a plan without a root.
  std::byte* at_sender(const Op& op) const {
    const bool sends_to_owners =
        op.buffer == Buffer::kContribution && plan_.args().algorithm == Algorithm::kTwoShot;
    const auto* const same = sends_to_owners
                                 ? slots_.own_payload(op, Buffer::kOutgoing, plan_.args().rank)
                                 : slots_.own_payload(op, op.buffer, op.index);
    return transport_.at_peer(same, op.peer);
  }

  void queue_transfer(Direction direction, const Op& op) {
    if (direction == Direction::kReceive && transport_.reads_in_place())
      slots_.place(op, at_sender(op));
    const bool known = direction == Direction::kSend && !grouped_;
    const auto& codec = slots_.codec_of(op.buffer);
    const auto bytes = known ? content(slots_.payload(op), codec) : slots_.payload(op);
    if (grouped_ && !codec.info().fixed_size) open_.push_back(posted_.size());
    posted_.push_back({direction, bytes.data(), bytes.size(), op.peer, job_.tag});
    owners_.push_back(&slots_.requests(op));
  }

  // One call for all transfers since the last: a frontend's lock is taken once.
  void post() {
    // A transport of groups counts steps: on all ranks alike, whether they move something or not.
    if (posted_.empty() && !grouped_) return;
    if (any_size_) learn();
    observe("cccl_communicate", [&] { transport_.post(posted_, queue_); });
    // Ranks that share cores all begin sending before one encodes on.
    if (on_host_) std::this_thread::yield();
    for (std::size_t i = 0; i < posted_.size(); ++i) {
      const auto& transfer = posted_[i];
      owners_[i]->push_back(transfer.request);
      if (transfer.direction == Direction::kSend)
        run_.stats.bytes_sent += transfer.bytes;
      else if (grouped_)
        run_.stats.bytes_received += transfer.bytes;
    }
    run_.stats.messages += posted_.size();
    posted_.clear();
    owners_.clear();
  }

  void learn() {
    std::vector<Request> requests;
    measure(&RunStats::exposed, "cccl_communicate",
            [&] { requests = learn_sizes(posted_, open_, sizes_); });
    for (std::size_t i = 0; i < open_.size(); ++i)
      if (posted_[open_[i]].direction == Direction::kSend)
        owners_[open_[i]]->push_back(requests[i]);
    open_.clear();
    sizes_.earlier.clear();
  }

  // Where it is not known before.
  void note_received(Bytes found) {
    if (!grouped_) run_.stats.bytes_received += found.size();
  }

  void await(std::vector<Request>& requests) {
    awaited_.insert(awaited_.end(), requests.begin(), requests.end());
    requests.clear();
  }

  // For all awaited since the last time, in one call.
  void wait() {
    if (awaited_.empty()) return;
    // A step is one group where both ends must be in the same: what is awaited is of earlier ones.
    if (!grouped_) post();
    measure(&RunStats::exposed, nullptr, [&] { transport_.wait(awaited_, queue_, job_.deadline); });
    awaited_.clear();
  }

  EncodeArgs encode_args(const Op& op, ConstValues in, std::uint64_t seed) const {
    EncodeArgs args;
    args.in = in;
    args.position = op.position;
    args.seed = seed;
    args.runs = job_.runs;
    args.checksum = job_.checksum;
    args.out = slots_.payload(op);
    return args;
  }

  void encode(const Codec& codec, std::uint64_t seed, const Op& op) {
    const auto args = encode_args(op, job_.in.part(op.values.offset, op.values.count), seed);
    if (!sample_.first) sample_ = {&codec, args};
    if (job_.sender && op.kind == OpKind::kEncode) {
      transport_.flush(queue_);
      measure(&RunStats::encode, "cccl_compress",
              [&] { platform_.encode(codec, args, job_.sender->from(sender_place(op)), queue_); });
      if (on_host_) run_.sent_non_finite |= (header_of(args.out).flags & kHasNonFinite) != 0;
      return;
    }
    encodes_.push_back(args);
    encoder_ = &codec;
  }

  void run_batches() {
    if (!encodes_.empty() || !decodes_.empty()) transport_.flush(queue_);
    if (!encodes_.empty())
      measure(&RunStats::encode, "cccl_compress", [&] { encoder_->encode_all(encodes_, queue_); });
    encodes_.clear();
    if (decodes_.empty()) return;
    measure(&RunStats::decode, "cccl_decompress",
            [&] { job_.result->decode_all(decodes_, queue_); });
    for (const auto& [payload, _] : decodes_) note_non_finite(payload, -1);
    if (job_.measures_noise) read_statistics();
    decodes_.clear();
    for (const auto& [from, to] : known_) platform_.copy_finite(from, to, queue_);
    known_.clear();
  }

  // Of the results that were just decoded: chunk by chunk, and in the order of their owners.
  void read_statistics() {
    std::vector<const std::byte*> places;
    PipelineRun::Statistics found;
    for (const auto& [payload, out] : decodes_) {
      places.push_back(payload.data() + offsetof(PayloadHeader, statistics));
      found.counts.push_back(out.count);
    }
    found.numbers = platform_.read_numbers(places, queue_);
    run_.statistics.push_back(std::move(found));
  }

  // Of a contribution in this rank's residual, where each part of a reduce-scatter begins at a
  // multiple of the residual's granularity.
  std::size_t sender_place(const Op& op) const {
    const auto& counts = plan_.args().counts;
    if (counts.size() == 1) return op.values.offset;
    const std::size_t step = residual_granularity(job_.sender->type);
    std::size_t start = 0, place = 0;
    for (int rank = 0; rank < op.index; ++rank) {
      start += counts[rank];
      place += (counts[rank] + step - 1) / step * step;
    }
    return place + op.values.offset - start;
  }

  // Once, while the first chunk is on its way; its values are still those that were encoded.
  void sample_error() {
    const auto& [codec, args] = sample_;
    if (sampled_ || !codec || !job_.timed || !is_floating(args.in.dtype)) return;
    sampled_ = true;
    run_.sample = platform_.sample_error(*codec, args, queue_);
  }

  void check_step() {
    const auto where = "step " + std::to_string(step_) + " of " + std::to_string(plan_.steps()) +
                       " of the pipeline: ";
    try {
      transport_.flush(queue_);
      wait_on_host(*queue_.record(), transport_, job_.deadline);
      if (const auto found = job_.findings(); found.damage) std::rethrow_exception(found.damage);
    } catch (const CorruptPayloadError& error) {
      throw CorruptPayloadError(where + error.what());
    } catch (const DeviceError& error) {
      throw DeviceError(where + error.what());
    }
  }

  // Of a result that is decoded: the owner made its own, but where there is a root.
  bool is_received(const Op& op) const {
    const auto& args = plan_.args();
    if (has_root(args.collective)) return args.rank != args.root;
    return op.index != args.rank;
  }

  ReduceArgs contributions(const Op& op) {
    sources_.clear();
    for (int rank = 0; rank < plan_.args().size; ++rank) {
      sources_.push_back(
          content(slots_.payload(op, Buffer::kContribution, rank), *job_.contribution));
      if (rank != plan_.args().rank) note_received(sources_.back());
    }
    return {sources_, job_.divisor, job_.measures_noise};
  }

  void reduce(const Op& op) {
    const ConstValues shape{nullptr, op.count, job_.in.dtype};
    const auto sources = contributions(op);
    const auto target = encode_args(op, shape, job_.result_seed);
    transport_.flush(queue_);
    measure(&RunStats::reduce, "cccl_decompress", [&] {
      if (job_.owner)
        platform_.reduce_encode(*job_.contribution, sources, *job_.result, target,
                                job_.owner->from(reduced_), queue_);
      else
        job_.contribution->reduce_encode(sources, *job_.result, target, queue_);
    });
    reduced_ += op.count;
  }

  void deliver(const Op& op) {
    const auto args = contributions(op);
    const auto out = job_.out.part(op.values.offset, op.values.count);
    transport_.flush(queue_);
    measure(&RunStats::reduce, "cccl_decompress", [&] {
      job_.contribution->reduce(args, out, queue_);
      if (on_host_) run_.stats.non_finite |= has_non_finite(out);
    });
    for (std::size_t rank = 0; rank < args.payloads.size(); ++rank)
      note_non_finite(args.payloads[rank], static_cast<int>(rank));
  }

  // Of what this rank gives to all others unchanged: its values in job_.in, if a codec that loses
  // nothing sends them. To decode them would bring the same bits.
  std::optional<ConstValues> own_values(const Op& op) const {
    const auto& args = plan_.args();
    if (!job_.result->info().lossless || is_received(op)) return {};
    const auto offset = op.values.offset;
    if (args.collective == Collective::kBroadcast) return job_.in.part(offset, op.values.count);
    if (args.collective != Collective::kAllGather) return {};
    const auto begin =
        std::accumulate(args.counts.begin(), args.counts.begin() + args.rank, std::size_t{0});
    return job_.in.part(offset - begin, op.values.count);
  }

  void decode(const Op& op) {
    const auto out = job_.out.part(op.values.offset, op.values.count);
    const auto found = content(slots_.payload(op), *job_.result);
    if (const auto own = own_values(op)) {
      measure(&RunStats::decode, "cccl_decompress", [&] { platform_.copy(*own, out, queue_); });
      return note_non_finite(found, -1);
    }
    decodes_.push_back({found, out});
    if (job_.prediction.data)
      known_.push_back({out, job_.prediction.part(op.values.offset, op.values.count)});
    if (is_received(op)) note_received(found);
  }

  static PayloadHeader header_of(Bytes payload) {
    PayloadHeader header;
    std::memcpy(&header, payload.data(), sizeof header);
    return header;
  }

  // Of a payload whose header a codec has just checked.
  void note_non_finite(Bytes payload, int rank) {
    if (!on_host_) return;
    const auto header = header_of(payload);
    if (!(header.flags & kHasNonFinite)) return;
    auto& stats = run_.stats;
    stats.non_finite = true;
    const int origin = header.origin ? static_cast<int>(header.origin) - 1 : rank;
    if (origin >= 0 && (stats.origin < 0 || origin < stats.origin)) stats.origin = origin;
  }

  // Does `work`, and has its time on the queue added to a field.
  template <class Work>
  void measure(double RunStats::* field, const char* name, const Work& work) {
    if (!job_.timed) return observe(name, work);
    auto begin = queue_.record(true);
    observe(name, work);
    run_.spans.push_back({field, std::move(begin), queue_.record(true)});
  }

  template <class Work>
  void observe(const char* name, const Work& work) {
    if (!name || !job_.observer) return work();
    struct Range {
      Range(const RangeObserver& observer, const char* name) : observer(observer), name(name) {
        observer(name, true);
      }
      ~Range() { observer(name, false); }
      const RangeObserver& observer;
      const char* name;
    } range(job_.observer, name);
    work();
  }

  const Plan& plan_;
  const PipelineJob& job_;
  Transport& transport_;
  const Platform& platform_;
  Queue& queue_;
  const bool on_host_, grouped_;
  const bool any_size_;  // of what is sent; both ends must name it
  Slots slots_;
  std::vector<Transfer> posted_;
  std::vector<std::vector<Request>*> owners_;  // of posted_, in its order
  std::vector<std::size_t> open_;  // places in posted_ whose sizes are yet to be learned
  SizesJob sizes_;
  std::vector<Bytes> sources_;
  std::vector<Request> awaited_;
  std::vector<EncodeArgs> encodes_;  // not yet done, by encoder_
  std::vector<DecodeArgs> decodes_;
  std::vector<std::pair<ConstValues, Values>> known_;  // results, and predictions that take them
  const Codec* encoder_ = nullptr;
  std::pair<const Codec*, EncodeArgs> sample_;
  bool sampled_ = false;
  std::size_t step_ = 0;
  std::size_t reduced_ = 0;  // values of results that this rank has made
  PipelineRun run_;
};

}  // namespace

PipelineRun run_pipeline(const Plan& plan, const PipelineJob& job, Transport& transport,
                         const Platform& platform, Queue& queue, Pool& pool) {
  return Run(plan, job, transport, platform, queue, pool).run();
}

}  // namespace cccl
