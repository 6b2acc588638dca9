#include "plan_simulator.h"

#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>

namespace cccl::testing {
namespace {

enum class Kind { kContribution, kResult };

struct Payload {
  Kind kind;
  int source;  // whose contribution; of a result it does not matter
  Segment values;
};

bool same(const Segment& a, const Segment& b) { return a.offset == b.offset && a.count == b.count; }

std::string text(const Segment& s) {
  return std::to_string(s.count) + " values at " + std::to_string(s.offset);
}

struct Slot {
  std::optional<Payload> content, incoming;
  bool receiving = false, sending = false;  // posted and not awaited
  int unmatched = 0;                        // of those, how many wait for the other end
  bool consumed = true;

  bool busy() const { return receiving || sending; }
};

struct Posted {
  Slot* slot;
  Payload payload;  // of a receive: what is expected
};

struct Channel {
  std::deque<Posted> sends, receives;
};

using Channels = std::map<std::pair<int, int>, Channel>;  // from, to

class Rank {
 public:
  Rank(const PlanArgs& args, Channels& channels)
      : plan_(args), args_(plan_.args()), channels_(channels) {
    starts_.resize(args_.counts.size());
    std::exclusive_scan(args_.counts.begin(), args_.counts.end(), starts_.begin(), std::size_t{0});
    total_ = std::accumulate(args_.counts.begin(), args_.counts.end(), std::size_t{0});
    writes_.resize(total_);
    slots_.resize(plan_.depth() * args_.size * 3);
  }

  std::size_t sent() const { return sent_; }
  bool finished() const { return step_ == plan_.steps(); }

  // Runs until an await blocks. False if nothing could be done.
  bool advance() {
    bool moved = false;
    while (!finished()) {
      if (!loaded_) {
        ops_ = plan_.step(step_);
        next_ = 0;
        loaded_ = true;
      }
      for (; next_ < ops_.size(); ++next_, moved = true) {
        if (blocks(ops_[next_])) return moved;
        execute(ops_[next_]);
      }
      loaded_ = false;
      ++step_;
      moved = true;
    }
    return moved;
  }

  void check_end() const {
    const bool scatters = args_.collective == Collective::kReduceScatter;
    const std::size_t begin = scatters ? starts_[args_.rank] : 0;
    std::size_t end = scatters ? begin + args_.counts[args_.rank] : total_;
    if (only_sends()) end = 0;
    for (std::size_t i = 0; i < total_; ++i)
      if (writes_[i] != (begin <= i && i < end ? 1 : 0))
        throw PlanError(where() + "value " + std::to_string(i) + " written " +
                        std::to_string(writes_[i]) + " times");
    for (const auto& slot : slots_)
      if (slot.unmatched)
        throw PlanError(where() + "a transfer without its other end");
      else if (!slot.consumed && !slot.sending)
        throw PlanError(where() + "a payload that nobody used");
  }

  std::string where() const {
    std::string place = "rank " + std::to_string(args_.rank) + ", step " + std::to_string(step_);
    if (loaded_ && next_ < ops_.size()) {
      const auto& op = ops_[next_];
      constexpr const char* kinds[] = {"receive", "send",   "await",   "encode",
                                       "publish", "reduce", "deliver", "decode"};
      constexpr const char* buffers[] = {"outgoing", "contribution", "result"};
      place += std::string(", ") + kinds[static_cast<int>(op.kind)] + " " +
               buffers[static_cast<int>(op.buffer)] + "[" + std::to_string(op.index) +
               "] of chunk " + std::to_string(op.chunk) + ", " + text(op.values);
    }
    return place + ": ";
  }

 private:
  bool only_sends() const {
    return args_.collective == Collective::kSend && args_.rank == args_.root;
  }
  void require(bool held, const char* rule) const {
    if (!held) throw PlanError(where() + rule);
  }
  void require_same(const Segment& a, const Segment& b, const char* verb) const {
    if (!same(a, b)) throw PlanError(where() + text(a) + verb + text(b));
  }

  Slot& slot(const Op& op, Buffer buffer, int index) {
    require(index >= 0 && index < args_.size, "no such buffer");
    const auto kind = static_cast<std::size_t>(buffer);
    return slots_[((op.chunk % plan_.depth()) * 3 + kind) * args_.size + index];
  }
  Slot& slot(const Op& op) { return slot(op, op.buffer, op.index); }

  bool blocks(const Op& op) { return op.kind == OpKind::kAwait && slot(op).unmatched > 0; }

  void execute(const Op& op) {
    switch (op.kind) {
      case OpKind::kReceive: return receive(op);
      case OpKind::kSend: return send(op);
      case OpKind::kAwait: return finish_transfers(op);
      case OpKind::kEncode: return write(op, {Kind::kContribution, args_.rank, read_input(op)});
      case OpKind::kPublish: return write(op, {Kind::kResult, -1, read_input(op)});
      case OpKind::kReduce:
        read_contributions(op, op.values);
        return write(op, {Kind::kResult, -1, op.values});
      case OpKind::kDeliver: read_contributions(op, global(op)); return write_output(global(op));
      case OpKind::kDecode:
        read(slot(op), {Kind::kResult, -1, op.values});
        return write_output(op.values);
    }
  }

  // Where the values lie in the whole tensor, for inputs and outputs that are one rank's part.
  Segment global(const Op& op) const { return {op.values.offset + starts_[args_.rank], op.count}; }

  Segment read_input(const Op& op) {
    const Segment from = args_.collective == Collective::kAllGather ? global(op) : op.values;
    require(from.count == op.values.count && from.count == op.count, "two counts");
    require(op.position == from.offset, "position is not the offset in the whole tensor");
    require(from.offset + from.count <= total_, "reads beyond the input");
    const std::size_t owner = starts_.size() > 1 ? owner_of(op) : 0;
    require((from.offset - starts_[owner]) % args_.granularity == 0, "cuts a granule");
    for (std::size_t i = 0; i < from.count; ++i)
      require(writes_[from.offset + i] == 0, "reads an input that its output may have replaced");
    return from;
  }

  std::size_t owner_of(const Op& op) const { return static_cast<std::size_t>(op.index); }

  void write(const Op& op, const Payload& payload) {
    auto& to = slot(op);
    require(!to.busy(), "overwrites a buffer with a transfer under way");
    require(to.consumed, "overwrites a payload before its use");
    require(op.count <= plan_.max_shard() && op.count > 0, "a payload of an impossible size");
    to.content = payload;
    to.consumed = false;
  }

  void read(Slot& from, const Payload& expected) const {
    require(!from.receiving, "reads before the receive is awaited");
    require(from.content.has_value(), "reads an empty buffer");
    require(from.content->kind == expected.kind, "reads a payload of the other leg");
    require_same(expected.values, from.content->values, " wanted where the buffer has ");
    require(expected.kind == Kind::kResult || from.content->source == expected.source,
            "reads the contribution of another rank");
    from.consumed = true;
  }

  void read_contributions(const Op& op, const Segment& values) {
    require(op.count == values.count, "two counts");
    for (int rank = 0; rank < args_.size; ++rank)
      read(slot(op, Buffer::kContribution, rank), {Kind::kContribution, rank, values});
  }

  void write_output(const Segment& to) {
    require(to.offset + to.count <= total_, "writes beyond the output");
    for (std::size_t i = 0; i < to.count; ++i) ++writes_[to.offset + i];
  }

  void receive(const Op& op) {
    require(op.peer >= 0 && op.peer < args_.size && op.peer != args_.rank, "no such peer");
    const Kind kind = op.buffer == Buffer::kResult ? Kind::kResult : Kind::kContribution;
    write(op, {kind, op.peer, op.values});
    auto& to = slot(op);
    to.content.reset();
    to.receiving = true;
    ++to.unmatched;
    auto& channel = channels_[{op.peer, args_.rank}];
    channel.receives.push_back({&to, {kind, op.peer, op.values}});
    match(channel);
  }

  void send(const Op& op) {
    require(op.peer >= 0 && op.peer < args_.size && op.peer != args_.rank, "no such peer");
    auto& from = slot(op);
    require(!from.receiving && from.content.has_value(), "sends what is not there yet");
    require_same(op.values, from.content->values, " to send where the buffer has ");
    require(op.count == op.values.count, "two counts");
    from.sending = true;
    ++from.unmatched;
    sent_ += op.count;
    auto& channel = channels_[{args_.rank, op.peer}];
    channel.sends.push_back({&from, *from.content});
    match(channel);
  }

  void match(Channel& channel) const {
    while (!channel.sends.empty() && !channel.receives.empty()) {
      const auto sent = channel.sends.front(), wanted = channel.receives.front();
      channel.sends.pop_front();
      channel.receives.pop_front();
      require(sent.payload.kind == wanted.payload.kind,
              "a send of one leg meets a receive of the other");
      require_same(sent.payload.values, wanted.payload.values, " sent meet a receive of ");
      wanted.slot->incoming = sent.payload;
      --sent.slot->unmatched;
      --wanted.slot->unmatched;
    }
  }

  void finish_transfers(const Op& op) {
    auto& done = slot(op);
    if (done.receiving) done.content = done.incoming;
    if (done.sending && (op.buffer == Buffer::kOutgoing || only_sends())) done.consumed = true;
    done.receiving = done.sending = false;
  }

  Plan plan_;
  const PlanArgs& args_;
  Channels& channels_;
  std::vector<std::size_t> starts_;
  std::size_t total_ = 0, sent_ = 0;
  std::vector<int> writes_;
  std::vector<Slot> slots_;
  std::vector<Op> ops_;
  std::size_t step_ = 0, next_ = 0;
  bool loaded_ = false;
};

}  // namespace

Traffic simulate(PlanArgs args) {
  Channels channels;
  std::deque<Rank> ranks;
  for (args.rank = 0; args.rank < args.size; ++args.rank) ranks.emplace_back(args, channels);
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& rank : ranks) moved |= rank.advance();
  }
  Traffic traffic;
  for (const auto& rank : ranks) {
    if (!rank.finished()) throw PlanError(rank.where() + "blocks for ever");
    rank.check_end();
    traffic.sent.push_back(rank.sent());
  }
  return traffic;
}

}  // namespace cccl::testing
