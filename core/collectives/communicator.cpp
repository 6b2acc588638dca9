#include "collectives/communicator.h"

#include <cstring>
#include <optional>
#include <utility>

#include "api/measure.h"
#include "devices/cpu/queue.h"

namespace cccl {
namespace {

std::uint64_t seed_of(std::uint64_t base, std::uint64_t sequence, std::uint64_t source) {
  std::uint64_t x = base + 0x9E3779B97F4A7C15u * (sequence * 65536 + source + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
}

std::string codecs_of(const CollectiveCall& call) {
  if (!reduces(call.collective)) return call.result->spec();
  if (call.collective == Collective::kReduceScatter) return call.contribution->spec();
  const auto first = call.contribution->spec(), second = call.result->spec();
  return first == second ? first : first + " -> " + second;
}

std::string join(const std::vector<std::size_t>& counts) {
  std::string text;
  for (const auto count : counts) text += (text.empty() ? "" : ",") + std::to_string(count);
  return text;
}

Signature signature_of(const CollectiveCall& call, const PlanArgs& plan) {
  Signature signature;
  signature.set("collective", name_of(call.collective));
  signature.set("dtype", name_of(call.in.dtype));
  signature.set("count", join(plan.counts));
  signature.set("op", !reduces(call.collective) ? "none" : call.average ? "avg" : "sum");
  signature.set("root", std::to_string(call.root));
  signature.set("plan", std::string(name_of(plan.algorithm)) + ", chunk " +
                            std::to_string(plan.chunk) + ", window " + std::to_string(plan.window));
  signature.set("codecs", codecs_of(call));
  signature.set("checks", call.checksum ? "checksum" : "no checksum");
  return signature;
}

void check(const CollectiveCall& call, int size) {
  if (!call.contribution || !call.result) throw ConfigError("a collective needs a codec per leg");
  for (const auto* codec : {call.contribution.get(), call.result.get()})
    if (!codec->supports(call.in.dtype))
      throw UnsupportedError("codec '" + codec->spec() + "' does not take dtype " +
                             name_of(call.in.dtype));
  if (reduces(call.collective) && !is_floating(call.in.dtype))
    throw UnsupportedError(std::string(name_of(call.collective)) +
                           " sums floating-point values, not " + name_of(call.in.dtype) +
                           "; use the backend's own");
  if (call.in.dtype != call.out.dtype)
    throw UnsupportedError(std::string("input is ") + name_of(call.in.dtype) + ", output " +
                           name_of(call.out.dtype) + "; they must be the same");
  const bool gathered =
      call.collective == Collective::kReduceScatter || call.collective == Collective::kAllGather;
  if (gathered != !call.counts.empty() ||
      (gathered && call.counts.size() != static_cast<std::size_t>(size)))
    throw ConfigError(std::string(name_of(call.collective)) + ": counts has " +
                      std::to_string(call.counts.size()) + " entries for " + std::to_string(size) +
                      " ranks");
}

// Sizes of input and output against the counts, for the rank that calls.
void check_sizes(const CollectiveCall& call, int rank) {
  std::size_t in = call.in.count, out = call.in.count;
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

Communicator::Communicator(std::shared_ptr<Transport> transport, Seconds deadline)
    : transport_(std::move(transport)),
      deadline_(deadline),
      queue_(std::make_unique<CpuQueue>()),
      pool_(std::make_shared<CpuAllocator>()) {
  if (!(deadline.count() > 0))
    throw ConfigError("deadline = " + std::to_string(deadline.count()) +
                      " s; allowed: more than 0");
}

std::shared_ptr<Work> Communicator::submit(CollectiveCall call,
                                           std::function<void(std::exception_ptr)> on_done) {
  check(call, size());
  check_sizes(call, rank());
  const auto submitted = std::chrono::steady_clock::now();
  auto discard = [out = call.out] { fill_nan(out); };
  auto run_call = [this, call = std::move(call), submitted] { return run(call, submitted); };
  return thread_.submit({std::move(run_call), std::move(discard), std::move(on_done)});
}

std::shared_ptr<Work> Communicator::agree(const std::map<std::string, std::string>& fields) {
  Signature signature;
  for (const auto& [field, value] : fields) signature.set(field, value);
  auto compare = [this, signature] {
    return guard("agreement", [&] { agree_once(signature, sequence_++); });
  };
  return thread_.submit({std::move(compare), [] {}});
}

void Communicator::abort(const std::string& reason) {
  thread_.refuse(reason);
  failed_ = true;
  transport_->abort(reason);
}

// Runs `step`. A mismatch was found by all ranks before data moved; after any other error the
// ranks no longer know of each other what they did, so this one gives up for all.
std::exception_ptr Communicator::guard(const std::string& where,
                                       const std::function<void()>& step) {
  if (failed_)
    return std::make_exception_ptr(ClosedError("an earlier collective failed: " + closed()));
  try {
    step();
  } catch (const MismatchError&) {
    return std::current_exception();
  } catch (const std::exception& failure) {
    auto error = std::current_exception();
    abort(where + ": " + failure.what());
    return error;
  }
  return nullptr;
}

std::exception_ptr Communicator::run(const CollectiveCall& call,
                                     std::chrono::steady_clock::time_point submitted) {
  RunStats stats;
  std::string algorithm = "none";
  const std::string name = std::string(name_of(call.collective)) + " '" + call.label + "'";
  auto error = guard(name, [&] { stats = perform(call, algorithm); });
  if (error) fill_nan(call.out);
  if (!error && call.raise_non_finite && stats.non_finite)
    error = std::make_exception_ptr(NonFiniteError(
        name + " has a non-finite value" +
        (stats.origin >= 0 ? ", first from rank " + std::to_string(stats.origin) : "")));
  StatsRow row;
  row.calls = 1;
  row.failures = error ? 1 : 0;
  row.values = call.in.count;
  row.value_bytes = call.in.bytes();
  row.world_size = size();
  row.run = stats;
  row.latency = std::chrono::duration<double>(std::chrono::steady_clock::now() - submitted).count();
  process_stats().add({call.label, name_of(call.collective), codecs_of(call), algorithm,
                       name_of(call.in.dtype), ""},
                      row);
  return error;
}

void Communicator::agree_once(const Signature& signature, std::uint64_t sequence) {
  const auto digest = signature.digest();
  if (agreed_.contains(digest)) return;
  cccl::agree(signature, sequence, *transport_, *queue_, deadline_, signatures_);
  agreed_.insert(digest);
}

RunStats Communicator::perform(const CollectiveCall& call, std::string& algorithm) {
  const auto sequence = sequence_++;
  PlanArgs args;
  args.collective = call.collective;
  args.rank = rank();
  args.size = size();
  args.root = call.root;
  args.counts = call.counts.empty() ? std::vector{call.in.count} : call.counts;
  args = tune(std::move(args), call.tuning, *call.contribution, *call.result, call.in.dtype);
  const Plan plan(args);
  algorithm = name_of(args.algorithm);
  if (size() == 1) {
    if (call.in.bytes() && call.out.data != call.in.data)
      std::memcpy(call.out.data, call.in.data, call.in.bytes());
    RunStats stats;
    stats.non_finite = call.raise_non_finite && has_non_finite(call.in);
    return stats;
  }

  const auto signature = signature_of(call, args);
  agree_once(signature, sequence);
  PipelineJob job;
  job.in = call.in;
  job.out = call.out;
  job.contribution = call.contribution.get();
  job.result = call.result.get();
  job.divisor = call.average && reduces(call.collective) ? size() : 1;
  job.contribution_seed = seed_of(call.seed, sequence, 1 + static_cast<std::uint64_t>(rank()));
  job.result_seed = seed_of(0, sequence, 0);  // equal everywhere: in one-shot all ranks encode
  job.checksum = call.checksum;
  job.tag = tag_of(sequence, signature.digest());
  job.deadline = deadline_;
  return run_pipeline(plan, job, *transport_, *queue_, pool_);
}

}  // namespace cccl
