#include "scheduler/plan.h"

#include <algorithm>
#include <numeric>

#include "api/error.h"

namespace cccl {
namespace {

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

bool is_gathered(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather;
}

// Part `index` of `parts`, as even as whole granules allow; early parts are the larger ones.
Segment split(Segment whole, std::size_t granularity, std::size_t parts, std::size_t index) {
  const std::size_t granules = ceil_div(whole.count, granularity);
  const auto begin = [&](std::size_t i) {
    const std::size_t first = granules / parts * i + std::min(i, granules % parts);
    return std::min(first * granularity, whole.count);
  };
  return {whole.offset + begin(index), begin(index + 1) - begin(index)};
}

}  // namespace

const char* name_of(Collective collective) {
  constexpr const char* names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                   "send"};
  return names[static_cast<int>(collective)];
}

const char* name_of(Algorithm algorithm) {
  return algorithm == Algorithm::kTwoShot ? "two_shot" : "one_shot";
}

Plan::Plan(PlanArgs args) : args_(std::move(args)) {
  const std::size_t expected = is_gathered(args_.collective) ? args_.size : 1;
  if (args_.counts.size() != expected)
    throw ConfigError(std::string(name_of(args_.collective)) + " needs " +
                      std::to_string(expected) + " counts, got " +
                      std::to_string(args_.counts.size()));
  if (args_.root < 0 || args_.root >= args_.size)
    throw ConfigError("root = " + std::to_string(args_.root) + "; allowed: 0 to " +
                      std::to_string(args_.size - 1));
  if (args_.chunk == 0 || args_.chunk % args_.granularity != 0)
    throw ConfigError("chunk of " + std::to_string(args_.chunk) +
                      " values is no multiple of the codecs' block of " +
                      std::to_string(args_.granularity));
  if (args_.algorithm == Algorithm::kOneShot && args_.collective != Collective::kAllReduce)
    throw ConfigError(std::string("one_shot is an algorithm of all_reduce, not of ") +
                      name_of(args_.collective));
  if (args_.window == 0) throw ConfigError("window = 0; allowed: 1 or more");
  std::size_t start = 0;
  for (const auto count : args_.counts) {
    starts_.push_back(start);
    start += count;
    chunks_ = std::max(chunks_, ceil_div(count, args_.chunk));
  }
}

std::size_t Plan::steps() const { return chunks_ ? chunks_ + 2 * args_.window : 0; }

std::size_t Plan::depth() const {
  return std::min(chunks_, 2 * args_.window + args_.receive_ahead + 1);
}

std::size_t Plan::max_shard() const {
  std::size_t most = 0;
  for (int owner = 0; chunks_ && owner < args_.size; ++owner)
    most = std::max(most, shard(0, owner).count);
  return most;
}

std::size_t Plan::owned() const {
  std::size_t total = 0;
  for (std::size_t chunk = 0; chunk < chunks_; ++chunk) total += shard(chunk, args_.rank).count;
  return total;
}

// Where the values of `owner`'s shard of a chunk lie in the whole tensor.
Segment Plan::shard(std::size_t chunk, int owner) const {
  const std::size_t at = is_gathered(args_.collective) ? static_cast<std::size_t>(owner) : 0;
  const std::size_t from = std::min(chunk * args_.chunk, args_.counts[at]);
  const Segment whole{starts_[at] + from, std::min(args_.chunk, args_.counts[at] - from)};
  if (is_gathered(args_.collective) || args_.algorithm == Algorithm::kOneShot) return whole;
  if (args_.collective == Collective::kAllReduce)
    return split(whole, args_.granularity, args_.size, owner);
  // Broadcast: all but the root own a shard, so the root sends each value once.
  if (args_.size == 1) return whole;
  if (owner == args_.root) return {whole.offset, 0};
  return split(whole, args_.granularity, args_.size - 1, owner - (owner > args_.root));
}

std::vector<Op> Plan::step(std::size_t step) const {
  std::vector<Op> ops;
  const std::size_t ahead = args_.receive_ahead, window = args_.window;
  const auto within = [&](std::size_t lag, auto&& run) {
    if (step >= lag && step - lag < chunks_) run(step - lag);
  };
  // A receive goes out `ahead` steps before its send, those of the first steps all at the start, in
  // the order in which the peer sends: transfers of a pair match even where there are no tags.
  const auto receive = [&](std::size_t sent) {
    if (sent < chunks_) receive_contributions(sent, ops);
    if (sent >= window && sent - window < chunks_) receive_results(sent - window, ops);
  };
  for (std::size_t sent = 0; step == 0 && sent < ahead; ++sent) receive(sent);
  receive(step + ahead);
  within(0, [&](std::size_t chunk) { contribute(chunk, ops); });
  within(window, [&](std::size_t chunk) { reduce(chunk, ops); });
  within(2 * window, [&](std::size_t chunk) { collect(chunk, ops); });
  return ops;
}

namespace {

// Appends operations on the payloads of one chunk.
struct Writer {
  std::vector<Op>& ops;
  std::size_t chunk;

  void add(OpKind kind, Buffer buffer, int index, Segment values, int peer = -1) const {
    ops.push_back({kind, buffer, index, peer, chunk, values, values.count, values.offset});
  }
  void await(Buffer buffer, int index) const { add(OpKind::kAwait, buffer, index, {}); }
};

}  // namespace

void Plan::receive_contributions(std::size_t chunk, std::vector<Op>& ops) const {
  const Writer write{ops, chunk};
  const auto mine = shard(chunk, args_.rank);
  if (mine.count == 0 || args_.collective == Collective::kAllGather) return;
  if (has_root(args_.collective)) {
    if (args_.rank == args_.root) return;
    write.await(Buffer::kResult, args_.rank);
    write.add(OpKind::kReceive, Buffer::kResult, args_.rank, mine, args_.root);
    return;
  }
  for (int d = 1; d < args_.size; ++d) {
    const int peer = (args_.rank + args_.size - d) % args_.size;
    write.add(OpKind::kReceive, Buffer::kContribution, peer, mine, peer);
  }
}

void Plan::contribute(std::size_t chunk, std::vector<Op>& ops) const {
  const Writer write{ops, chunk};
  const int me = args_.rank;
  if (args_.collective == Collective::kAllGather) return;
  if (has_root(args_.collective)) {
    for (int owner = 0; me == args_.root && owner < args_.size; ++owner) {
      const auto values = shard(chunk, owner);
      if (values.count == 0) continue;
      write.await(Buffer::kResult, owner);
      write.add(OpKind::kPublish, Buffer::kResult, owner, values);
      if (owner != me) write.add(OpKind::kSend, Buffer::kResult, owner, values, owner);
    }
    return;
  }
  // Beginning with the next rank, so that no owner is everyone's first.
  const bool once = args_.algorithm == Algorithm::kOneShot;
  if (!once) {
    for (int d = 1; d < args_.size; ++d) {
      const int owner = (me + d) % args_.size;
      const auto values = shard(chunk, owner);
      if (values.count == 0) continue;
      write.await(Buffer::kOutgoing, owner);
      write.add(OpKind::kEncode, Buffer::kOutgoing, owner, values);
      write.add(OpKind::kSend, Buffer::kOutgoing, owner, values, owner);
    }
  }
  const auto mine = shard(chunk, me);
  if (mine.count == 0) return;
  if (once) write.await(Buffer::kContribution, me);
  write.add(OpKind::kEncode, Buffer::kContribution, me, mine);
  for (int d = 1; once && d < args_.size; ++d)
    write.add(OpKind::kSend, Buffer::kContribution, me, mine, (me + d) % args_.size);
}

void Plan::reduce(std::size_t chunk, std::vector<Op>& ops) const {
  const Writer write{ops, chunk};
  const int me = args_.rank;
  const auto mine = shard(chunk, me);
  if (mine.count == 0) return;
  const bool reduces =
      args_.collective == Collective::kAllReduce || args_.collective == Collective::kReduceScatter;
  for (int rank = 0; reduces && rank < args_.size; ++rank)
    if (rank != me) write.await(Buffer::kContribution, rank);
  if (args_.collective == Collective::kReduceScatter) {
    write.add(OpKind::kDeliver, Buffer::kContribution, me, mine);
    ops.back().values.offset -= starts_[me];
    return;
  }
  write.await(Buffer::kResult, me);
  if (reduces) write.add(OpKind::kReduce, Buffer::kResult, me, mine);
  if (args_.collective == Collective::kAllGather) {
    write.add(OpKind::kPublish, Buffer::kResult, me, mine);
    ops.back().values.offset -= starts_[me];
  }
  if (args_.algorithm == Algorithm::kOneShot) return;
  for (int d = 1; d < args_.size; ++d) {
    const int peer = (me + d) % args_.size;
    if (has_root(args_.collective) && peer == args_.root) continue;
    write.add(OpKind::kSend, Buffer::kResult, me, mine, peer);
  }
}

void Plan::receive_results(std::size_t chunk, std::vector<Op>& ops) const {
  const Writer write{ops, chunk};
  if (args_.collective == Collective::kReduceScatter || args_.algorithm == Algorithm::kOneShot)
    return;
  if (has_root(args_.collective) && args_.rank == args_.root) return;
  for (int d = 1; d < args_.size; ++d) {
    const int owner = (args_.rank + args_.size - d) % args_.size;
    const auto values = shard(chunk, owner);
    if (values.count) write.add(OpKind::kReceive, Buffer::kResult, owner, values, owner);
  }
}

void Plan::collect(std::size_t chunk, std::vector<Op>& ops) const {
  const Writer write{ops, chunk};
  if (args_.collective == Collective::kReduceScatter) return;
  if (args_.collective == Collective::kSend && args_.rank == args_.root) return;
  for (int owner = 0; owner < args_.size; ++owner) {
    if (args_.algorithm == Algorithm::kOneShot && owner != args_.rank) continue;
    const auto values = shard(chunk, owner);
    if (values.count == 0) continue;
    if (owner != args_.rank) write.await(Buffer::kResult, owner);
    write.add(OpKind::kDecode, Buffer::kResult, owner, values);
  }
}

}  // namespace cccl
