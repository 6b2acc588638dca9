#include "collectives/engine.h"

#include <cstring>
#include <utility>

#include "api/measure.h"
#include "collectives/hash.h"
#include "devices/cpu/queue.h"

namespace cccl {
namespace {

// Digests kept; beyond it ranks agree anew.
constexpr std::size_t kMostAgreed = 4096;

std::uint64_t seed_of(std::uint64_t base, std::uint64_t sequence, std::uint64_t source) {
  return mix(base + 0x9E3779B97F4A7C15u * (sequence * 65536 + source + 1));
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
  signature.set("checks", std::string(call.checksum ? "checksum" : "no checksum") +
                              (call.raise_non_finite ? ", raise non-finite" : ""));
  return signature;
}

}  // namespace

Engine::Engine(std::shared_ptr<Transport> transport, Seconds deadline)
    : deadline_(deadline),
      queue_(std::make_unique<CpuQueue>()),
      pool_(std::make_shared<CpuAllocator>()),
      transport_(std::move(transport)) {}

std::exception_ptr Engine::agree(const Signature& signature) {
  return guard("agreement", [&] { agree_once(signature, sequence_++, deadline_); });
}

void Engine::fail(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = reason;
  }
  transport_->abort(reason);
}

std::string Engine::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

// Runs `step`. A mismatch was found by all ranks before data moved; after any other error the
// ranks no longer know of each other what they did, so this one gives up for all.
std::exception_ptr Engine::guard(const std::string& where, const std::function<void()>& step) {
  if (const auto earlier = failure(); !earlier.empty())
    return std::make_exception_ptr(ClosedError("an earlier collective failed: " + earlier));
  try {
    step();
  } catch (const MismatchError&) {
    return std::current_exception();
  } catch (const std::exception& failure) {
    auto error = std::current_exception();
    fail(where + ": " + failure.what());
    return error;
  }
  return nullptr;
}

std::exception_ptr Engine::run(const CollectiveCall& call,
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
  row.world_size = transport_->size();
  row.predicted = call.predicted;
  row.alternative = call.alternative;
  row.run = stats;
  row.latency = std::chrono::duration<double>(std::chrono::steady_clock::now() - submitted).count();
  process_stats().add({call.label, name_of(call.collective), codecs_of(call), algorithm,
                       name_of(call.in.dtype), ""},
                      row);
  return error;
}

std::uint64_t Engine::agree_once(const Signature& signature, std::uint64_t sequence,
                                 Seconds deadline) {
  const auto digest = signature.digest();
  if (!agreed_.contains(digest)) {
    cccl::agree(signature, sequence, *transport_, *queue_, deadline, signatures_);
    if (agreed_.size() == kMostAgreed) agreed_.clear();  // on all ranks: they agree in one order
    agreed_.insert(digest);
  }
  return digest;
}

RunStats Engine::perform(const CollectiveCall& call, std::string& algorithm) {
  const auto sequence = sequence_++;
  PlanArgs args;
  args.collective = call.collective;
  args.rank = transport_->rank();
  args.size = transport_->size();
  args.root = call.root;
  args.receive_ahead = transport_->receive_ahead();
  args.counts = call.counts.empty() ? std::vector{call.in.count} : call.counts;
  args = tune(std::move(args), call.tuning, *call.contribution, *call.result, call.in.dtype);
  const Plan plan(args);
  algorithm = name_of(args.algorithm);
  if (transport_->size() == 1) {
    if (call.in.bytes() && call.out.data != call.in.data)
      std::memcpy(call.out.data, call.in.data, call.in.bytes());
    RunStats stats;
    stats.non_finite = call.raise_non_finite && has_non_finite(call.in);
    return stats;
  }

  const auto deadline = call.deadline.value_or(deadline_);
  const auto digest = agree_once(signature_of(call, args), sequence, deadline);
  PipelineJob job;
  job.in = call.in;
  job.out = call.out;
  job.contribution = call.contribution.get();
  job.result = call.result.get();
  job.divisor = call.average && reduces(call.collective) ? transport_->size() : 1;
  job.contribution_seed =
      seed_of(call.seed, sequence, 1 + static_cast<std::uint64_t>(transport_->rank()));
  job.result_seed = seed_of(0, sequence, 0);  // equal everywhere: in one-shot all ranks encode
  job.checksum = call.checksum;
  job.tag = tag_of(sequence, digest);
  job.deadline = deadline;
  return run_pipeline(plan, job, *transport_, *queue_, pool_);
}

}  // namespace cccl
