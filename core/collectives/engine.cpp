#include "collectives/engine.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "api/measure.h"
#include "collectives/hash.h"
#include "scheduler/wait.h"

namespace cccl {
namespace {

// Digests kept; beyond it ranks agree anew.
constexpr std::size_t kMostAgreed = 4096;
// Captured into graphs that read in place.
constexpr std::size_t kMostGraphs = 256;
// On devices, where timing costs the host a few microseconds per operation: the first calls, then
// one in so many.
constexpr std::uint64_t kTimedFirst = 16, kTimedOneIn = 8;
// For the work of a collective that was given up to pass, so that its output is NaN.
constexpr Seconds kPatience{5};

std::atomic<std::uint64_t> engines_made{0};

std::uint64_t seed_of(std::uint64_t base, std::uint64_t sequence, std::uint64_t source) {
  return mix(base + 0x9E3779B97F4A7C15u * (sequence * 65536 + source + 1));
}

std::string codecs_of(const CollectiveCall& call) {
  if (!reduces(call.collective)) return call.result->spec();
  if (call.collective == Collective::kReduceScatter) return call.contribution->spec();
  const auto first = call.contribution->spec(), second = call.result->spec();
  return first == second ? first : first + " -> " + second;
}

// The two ends of a send are rows apart.
std::string name_in_stats(const CollectiveCall& call, int rank) {
  const bool receives = call.collective == Collective::kSend && rank != call.root;
  return receives ? "recv" : name_of(call.collective);
}

std::string name_of(const FeedbackSettings& settings) {
  if (!settings.sender && !settings.owner) return "";
  return std::string(", error feedback") + (settings.sender ? " sender" : "") +
         (settings.owner ? " owner" : "") + " " + kResidualTypes[static_cast<int>(settings.type)] +
         " decay " + std::to_string(settings.decay);
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
                              (call.raise_non_finite ? ", raise non-finite" : "") +
                              (call.noise ? ", measures noise" : "") + name_of(feedback_of(call)));
  return signature;
}

bool overlap(ConstValues a, ConstValues b) {
  const auto* const first = static_cast<const std::byte*>(a.data);
  const auto* const second = static_cast<const std::byte*>(b.data);
  return first < second + b.bytes() && second < first + a.bytes();
}

std::string describe(const CollectiveCall& call) {
  return std::string(name_of(call.collective)) + " '" + call.label + "'";
}

}  // namespace

bool predicts(const CollectiveCall& call) {
  return call.store && call.collective == Collective::kAllReduce &&
         (call.contribution->info().predicts || call.result->info().predicts);
}

FeedbackSettings feedback_of(const CollectiveCall& call) {
  auto settings = call.feedback;
  const bool possible = call.store && reduces(call.collective);
  settings.sender &= possible && !call.contribution->info().lossless;
  settings.owner &=
      possible && call.collective == Collective::kAllReduce && !call.result->info().lossless;
  return settings;
}

Engine::Engine(std::shared_ptr<Transport> transport, std::shared_ptr<const Platform> platform,
               Seconds deadline, const std::vector<void*>& streams)
    : number_(++engines_made),
      deadline_(deadline),
      platform_(std::move(platform)),
      failed_(platform_->new_flag()),
      transport_(std::move(transport)) {
  for (void* const stream : streams)
    eager_.push_back(workplace_on(platform_->new_queue_on(stream)));
  transport_->when_it_fails([this](const std::string& reason) { fail(reason); });
}

Engine::~Engine() = default;

Engine::Workplace Engine::workplace_on(std::unique_ptr<Queue> queue) const {
  auto pool = std::make_unique<Pool>(platform_->allocator_for(*queue));
  return {std::move(queue), std::move(pool), nullptr, {}, {}, nullptr, nullptr};
}

Engine::Workplace& Engine::take_workplace(const CollectiveCall& call) {
  auto& taken = eager_[turn_++ % eager_.size()];
  for (const auto& other : eager_) {
    if (&other == &taken) continue;
    // All but the last one there are done before this begins: only that may be in its way.
    if (other.end_before) taken.queue->wait(*other.end_before);
    const bool meets =
        overlap(other.out, call.in) || overlap(other.out, call.out) || overlap(other.in, call.out);
    if (other.end && meets) taken.queue->wait(*other.end);
  }
  return taken;
}

Engine::Captured& Engine::place_of_capture(std::uint64_t capture) {
  auto& place = captured_[capture];
  if (!place.queue) place = {platform_->new_queue(), platform_->new_counter(), nullptr};
  return place;
}

std::exception_ptr Engine::agree(const Signature& signature) {
  return guard("agreement", [&] { agree_once(signature, sequence_++, deadline_); });
}

void Engine::fail(const std::string& reason, std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) {
      failure_ = reason;
      first_error_ = std::move(error);
    }
  }
  *failed_ = 1;
  *open_ = false;
  transport_->abort(reason);
}

std::string Engine::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::exception_ptr Engine::first_error() const {
  const std::lock_guard lock(mutex_);
  return first_error_;
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
  } catch (const CaptureError&) {
    return std::current_exception();
  } catch (const std::exception& failure) {
    auto error = std::current_exception();
    // What a transport says after an abort is less than the abort's reason.
    if (const auto reason = this->failure();
        !reason.empty() && dynamic_cast<const ClosedError*>(&failure))
      return std::make_exception_ptr(ClosedError(where + " was given up: " + reason));
    fail(where + ": " + failure.what(), error);
    return error;
  }
  return nullptr;
}

Launched Engine::launch(const CollectiveCall& call,
                        std::chrono::steady_clock::time_point submitted) {
  Launched launched;
  launched.call = call;
  launched.submitted = submitted;
  launched.error = guard(describe(call), [&] { perform(launched); });
  if (!launched.error || launched.captured) return launched;
  try {
    auto& queue = launched.queue ? *launched.queue : *eager_.front().queue;
    const auto callers = platform_->queue_on(call.stream);
    queue.wait(*callers->record());
    platform_->fill_nan(call.out, {}, queue);
    if (launched.state) platform_->spoil(launched.state->spoiled, {}, queue);
    launched.end = queue.record();
    if (launched.state) call.store->launched(queue, launched.end);
    callers->wait(*launched.end);
  } catch (const Error&) {  // a device that failed writes no more
  }
  return launched;
}

std::exception_ptr Engine::finish(Launched launched) {
  platform_->enter_thread();
  const auto& call = launched.call;
  auto error = launched.error;
  if (launched.captured) return error;
  if (!error && platform_->device().kind == DeviceKind::kCpu)
    settle(launched);  // it is done: a failure of others comes too late for this one
  else if (!error)
    error = guard(describe(call), [&] { await(launched); });
  if (error && launched.end) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    try {
      while (!launched.end->done() && std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(Seconds(1e-3));
    } catch (const Error&) {  // as above
    }
  }
  auto& stats = launched.run.stats;
  if (!error && call.raise_non_finite && stats.non_finite)
    error = std::make_exception_ptr(NonFiniteError(
        describe(call) + " has a non-finite value" +
        (stats.origin >= 0 ? ", first from rank " + std::to_string(stats.origin) : "")));
  if (launched.state && !error && !stats.non_finite && !launched.run.sent_non_finite)
    call.store->succeeded(*launched.state);
  StatsRow row;
  row.calls = 1;
  const auto feedback = feedback_of(call);
  row.feedback_calls = launched.state && (feedback.sender || feedback.owner) ? 1 : 0;
  row.timed_calls = launched.timed && !error ? 1 : 0;
  row.failures = error ? 1 : 0;
  row.values = call.in.count;
  row.value_bytes = call.in.bytes();
  row.world_size = transport_->size();
  row.predicted = call.predicted;
  row.alternative = call.alternative;
  if (!error) row.run = stats;
  if (!error && call.noise) *call.noise = stats.noise;
  row.latency =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - launched.submitted).count();
  process_stats().add({call.label, name_in_stats(call, transport_->rank()), codecs_of(call),
                       launched.algorithm, name_of(call.in.dtype), "", call.leg},
                      row);
  return error;
}

// The deadline counts from when the caller's own work, and earlier collectives, are done.
void Engine::await(Launched& launched) {
  if (launched.begin) wait_on_host(*launched.begin, *transport_, kForever);
  wait_on_host(*launched.end, *transport_, launched.call.deadline.value_or(deadline_));
  if (const auto reason = failure(); !reason.empty())
    throw ClosedError("it was given up meanwhile: " + reason);
  settle(launched);
}

void Engine::settle(Launched& launched) {
  launched.run.settle();
  const auto found = launched.findings();
  if (found.damage) std::rethrow_exception(found.damage);
  auto& stats = launched.run.stats;
  if (!found.non_finite) return;
  stats.non_finite = true;
  stats.origin = found.origin;
}

std::uint64_t Engine::agree_once(const Signature& signature, std::uint64_t sequence,
                                 Seconds deadline, bool capturing) {
  const auto digest = signature.digest();
  if (!agreed_.contains(digest)) {
    if (capturing)
      throw CaptureError(
          "a collective in a CUDA graph must have run once before the capture, with the same "
          "shapes and settings: ranks agree on it, and connect, at the first use");
    cccl::agree(signature, sequence, *transport_, *eager_.front().queue, deadline, signatures_);
    if (agreed_.size() == kMostAgreed) agreed_.clear();  // on all ranks: they agree in one order
    agreed_.insert(digest);
  }
  return digest;
}

// The transport that carries the call instead of transport_, if one can: on all ranks or on none,
// which have agreed on the call. `capture`: into which graph.
Transport* Engine::direct_for(const CollectiveCall& call, std::uint64_t capture) {
  const bool is_fixed = call.contribution->info().fixed_size && call.result->info().fixed_size;
  auto* const direct = transport_->size() > 1 && is_fixed && !has_root(call.collective)
                           ? transport_->direct()
                           : nullptr;
  if (direct && capture && !captured_.contains(capture) && captured_.size() >= kMostGraphs)
    throw CaptureError(
        "more than " + std::to_string(kMostGraphs) +
        " CUDA graphs of one group: each keeps memory that the other ranks read, until the group "
        "ends. Set peer_memory to 'off' on all ranks before the group's first collective.");
  return direct;
}

void Engine::perform(Launched& launched) {
  const auto& call = launched.call;
  const auto sequence = sequence_++;
  PlanArgs asked;
  asked.collective = call.collective;
  asked.rank = transport_->rank();
  asked.size = transport_->size();
  asked.root = call.root;
  asked.counts = call.counts.empty() ? std::vector{call.in.count} : call.counts;
  const auto feedback = feedback_of(call);
  const bool remembers = feedback.sender || feedback.owner;
  auto tuning = call.tuning;
  if (call.noise) tuning.algorithm = Algorithm::kTwoShot;  // in one shot there is no owner to tell
  const auto planned_for = [&](const Transport& transport) {
    auto args = asked;
    args.receive_ahead = transport.receive_ahead();
    args.in_place = transport.reads_in_place();
    return tune(std::move(args), tuning, *call.contribution, *call.result, call.in.dtype,
                remembers ? residual_granularity(feedback.type) : 1);
  };
  auto args = planned_for(*transport_);

  const auto callers = platform_->queue_on(call.stream);
  const auto capture = callers->capture();
  const bool on_host = platform_->device().kind == DeviceKind::kCpu;
  const auto deadline = call.deadline.value_or(deadline_);
  launched.captured = capture != 0;
  const bool any_size = args.size > 1 && sends_any_size(args, *call.contribution, *call.result);
  if (launched.captured && any_size)
    throw CaptureError(
        "codec " + codecs_of(call) +
        " cannot be captured into a CUDA graph: how long its payloads are depends on the values, "
        "and the host, which NCCL asks for it, must wait for that. Capture it with a codec of "
        "fixed size, or plain.");
  if (launched.captured && remembers)
    throw CaptureError(
        "error feedback cannot be captured into a CUDA graph: which residual is the last one's "
        "changes from step to step. Capture it with error_feedback 'none'.");
  if (launched.captured && predicts(call))
    throw CaptureError(
        "codec " + codecs_of(call) +
        " cannot be captured into a CUDA graph: which mean it predicts by changes from step to "
        "step. Capture it with its inner codec.");
  launched.timed =
      !launched.captured && (on_host || sequence < kTimedFirst || sequence % kTimedOneIn == 0);
  std::uint64_t digest = 0;
  if (args.size > 1)
    digest = agree_once(signature_of(call, args), sequence, deadline, launched.captured);
  auto* const direct = direct_for(call, capture);
  auto& transport = direct ? *direct : *transport_;
  if (direct) args = planned_for(transport);
  const Plan plan(args);
  launched.algorithm = std::string(name_of(args.algorithm)) + (args.in_place ? ", in place" : "");
  auto* const place = launched.captured ? nullptr : &take_workplace(call);
  auto* const graph = launched.captured ? &place_of_capture(capture) : nullptr;
  auto& queue = place ? *place->queue : *graph->queue;
  launched.queue = &queue;
  queue.wait(*callers->record());
  if (place) launched.findings = queue.watch();
  if (args.size > 1) {
    PipelineJob job;
    job.in = call.in;
    job.out = call.out;
    job.contribution = call.contribution.get();
    job.result = call.result.get();
    job.divisor = call.average && reduces(call.collective) ? args.size : 1;
    job.contribution_seed = seed_of(call.seed, sequence, 1 + static_cast<std::uint64_t>(args.rank));
    job.result_seed = seed_of(0, sequence, 0);  // equal everywhere: in one-shot all ranks encode
    if (graph) platform_->count(graph->runs.get(), queue);
    if (graph) job.runs = graph->runs.get();
    job.checksum = call.checksum;
    job.measures_noise = call.noise && !launched.captured;
    job.timed = launched.timed;
    job.debug = call.debug && !launched.captured;
    job.findings = launched.findings;
    job.tag = tag_of(sequence, digest);
    job.deadline = deadline;
    job.observer = call.observer;
    if (remembers || predicts(call)) {
      const auto& pieces = call.layout->pieces;
      const auto key = (pieces.empty() ? call.label : pieces.front().name) + ", " +
                       name_of(call.collective) + ", " + name_of(call.in.dtype);
      launched.state =
          call.store->use(key, *call.layout, feedback, plan, call.step, platform_, queue);
      const auto& state = *launched.state;
      if (feedback.sender) job.sender = state.sender.view(feedback.decay, state.spoiled);
      if (feedback.owner) job.owner = state.owner.view(feedback.decay, state.spoiled);
      if (predicts(call)) {
        const auto known = call.store->predict(*launched.state, call.out, number_, queue);
        const auto informed = [&](const auto& codec) {
          return codec->info().predicts ? codec->with_prediction(known) : codec;
        };
        job.contribution = (launched.contribution = informed(call.contribution)).get();
        job.result = (launched.result = informed(call.result)).get();
        job.prediction = launched.state->prediction.values;
      }
    }
    launched.begin = queue.record(!launched.captured);
    if (any_size && !on_host) {
      job.earlier = {launched.begin};
      for (const auto& other : eager_)
        if (other.end) job.earlier.push_back(other.end);
    }
    Pool own(platform_->allocator_for(queue));  // of a graph, which keeps it
    auto& shared = place ? place->shared : graph->shared;
    if (direct && !shared)
      shared = std::make_unique<Pool>(direct->allocator(place ? eager_.size() : 1));
    auto& pool = direct ? *shared : place ? *place->pool : own;
    launched.run = run_pipeline(plan, job, transport, *platform_, queue, pool);
    if (!on_host) platform_->fill_nan(call.out, failed_, queue);
    if (launched.state) platform_->spoil(launched.state->spoiled, failed_, queue);
  } else {
    platform_->copy(call.in, call.out, queue);
    launched.run.stats.non_finite = on_host && call.raise_non_finite && has_non_finite(call.in);
  }
  launched.end = queue.record(!launched.captured);
  if (launched.state) call.store->launched(queue, launched.end);
  if (!place) return;
  launched.before = std::exchange(last_end_, launched.end);
  place->in = call.in;
  place->out = call.out;
  place->end_before = std::exchange(place->end, launched.end);
}

}  // namespace cccl
