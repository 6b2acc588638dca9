#include "collectives/communicator.h"

#include <utility>

#include "api/measure.h"

namespace cccl {
namespace {

constexpr int kMostRanksOnDevice = 64;  // a kernel reads that many payloads

void check(const CollectiveCall& call, int size) {
  if (call.collective == Collective::kSend && size == 1)
    throw ConfigError("a send needs a rank to receive it: this group has one rank");
  if (!call.contribution || !call.result) throw ConfigError("a collective needs a codec per leg");
  for (const auto* codec : {call.contribution.get(), call.result.get()})
    if (!codec->supports(call.in.dtype))
      throw UnsupportedError("codec '" + codec->spec() + "' does not take dtype " +
                             name_of(call.in.dtype));
  if (reduces(call.collective) && !is_floating(call.in.dtype))
    throw UnsupportedError(std::string(name_of(call.collective)) +
                           " sums floating-point values, not " + name_of(call.in.dtype) +
                           "; use the backend's own");
  if (call.noise && call.collective != Collective::kAllReduce)
    throw ConfigError(std::string("noise is measured in all_reduce, not in ") +
                      name_of(call.collective));
  if (call.in.dtype != call.out.dtype)
    throw UnsupportedError(std::string("input is ") + name_of(call.in.dtype) + ", output " +
                           name_of(call.out.dtype) + "; they must be the same");
  const bool gathered =
      call.collective == Collective::kReduceScatter || call.collective == Collective::kAllGather;
  std::size_t placed = 0;
  for (const auto& piece : call.layout ? call.layout->pieces : std::vector<Piece>{})
    placed += piece.count;
  if (call.store && placed != call.in.count)
    throw ConfigError("the layout of '" + call.label + "' has " + std::to_string(placed) +
                      " values, the tensor " + std::to_string(call.in.count));
  if (gathered != !call.counts.empty() ||
      (gathered && call.counts.size() != static_cast<std::size_t>(size)))
    throw ConfigError(std::string(name_of(call.collective)) + ": counts has " +
                      std::to_string(call.counts.size()) + " entries for " + std::to_string(size) +
                      " ranks");
}

void check_deadline(Seconds deadline) {
  if (!(deadline.count() > 0 && deadline <= kLongestDeadline))
    throw ConfigError("deadline = " + std::to_string(deadline.count()) +
                      " s; allowed: more than 0, and at most 31 days");
}

// Sizes of input and output against the counts, for the rank that calls.
void check_sizes(const CollectiveCall& call, int rank) {
  std::size_t in = call.in.count, out = call.in.count;
  if (call.collective == Collective::kSend && rank == call.root) out = 0;
  if (!call.counts.empty()) {
    std::size_t total = 0;
    for (const auto count : call.counts) total += count;
    const bool scatters = call.collective == Collective::kReduceScatter;
    in = scatters ? total : call.counts[rank];
    out = scatters ? call.counts[rank] : total;
  }
  if (call.in.count != in || call.out.count != out)
    throw ConfigError(std::string(name_of(call.collective)) + " of rank " + std::to_string(rank) +
                      ": input has " + std::to_string(call.in.count) + " values, output " +
                      std::to_string(call.out.count) + "; expected " + std::to_string(in) +
                      " and " + std::to_string(out));
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Transport> transport, Seconds deadline,
                           std::shared_ptr<const Platform> platform,
                           const std::vector<void*>& streams)
    : rank_(transport->rank()), size_(transport->size()), device_(platform->device()) {
  check_deadline(deadline);
  if (streams.empty()) throw ConfigError("a communicator on a device needs a stream");
  engine_ = std::make_shared<Engine>(std::move(transport), std::move(platform), deadline, streams);
  open_ = engine_->open();
}

std::string Communicator::closed() const {
  const auto failure = engine_->failure();
  return failure.empty() ? thread_.refused() : failure;
}

std::shared_ptr<Work> Communicator::submit(CollectiveCall call,
                                           std::function<void(std::exception_ptr)> on_done) {
  check(call, size());
  check_sizes(call, rank());
  if (call.deadline) check_deadline(*call.deadline);
  if (const auto feedback = feedback_of(call); feedback.sender || feedback.owner || predicts(call))
    call.store->check_place(device_);
  const auto submitted = std::chrono::steady_clock::now();
  if (device_.kind == DeviceKind::kCpu) {
    auto discard = [engine = engine_, out = call.out] { engine->discard(out); };
    Output output;
    output.noise = call.noise;
    auto run = [engine = engine_, call = std::move(call), submitted] {
      return engine->finish(engine->launch(call, submitted));
    };
    return enqueue({std::move(run), std::move(discard), std::move(on_done), std::move(output)});
  }
  if (size() > kMostRanksOnDevice)
    throw UnsupportedError("compressed collectives on a GPU take up to " +
                           std::to_string(kMostRanksOnDevice) + " ranks, this group has " +
                           std::to_string(size()) + ": send it plain");
  call.contribution = codec_on(device_.kind, std::move(call.contribution));
  call.result = codec_on(device_.kind, std::move(call.result));
  const std::lock_guard lock(launching_);
  refuse_after_failure();
  auto launched = std::make_shared<Launched>(engine_->launch(call, submitted));
  Output output{launched->end, launched->queue ? launched->queue->native() : nullptr,
                launched->begin, launched->before, launched->captured ? nullptr : call.noise};
  const auto error = launched->error;
  std::shared_ptr<Work> work;
  if (launched->captured) {
    output.begun = nullptr;  // a graph's events have no times
    work = Work::finished(output);
  } else {
    auto run = [engine = engine_, launched] { return engine->finish(std::move(*launched)); };
    work = thread_.submit({std::move(run), [] {}, std::move(on_done), output});
  }
  if (error) std::rethrow_exception(error);
  return work;
}

std::shared_ptr<Work> Communicator::agree(const std::map<std::string, std::string>& fields) {
  Signature signature;
  for (const auto& [field, value] : fields) signature.set(field, value);
  if (device_.kind == DeviceKind::kCpu)
    return enqueue({[engine = engine_, signature] { return engine->agree(signature); }, [] {}});
  const std::lock_guard lock(launching_);
  refuse_after_failure();
  if (const auto error = engine_->agree(signature)) std::rethrow_exception(error);
  return Work::finished();
}

void Communicator::refuse_after_failure() {
  if (const auto failure = engine_->failure(); !failure.empty()) thread_.refuse(failure);
  thread_.check_open();
}

std::shared_ptr<Work> Communicator::enqueue(Job job) {
  if (const auto failure = engine_->failure(); !failure.empty()) thread_.refuse(failure);
  return thread_.submit(std::move(job));
}

}  // namespace cccl
