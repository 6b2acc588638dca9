// What one rank does in a collective, as a pure function: no device, no transport, no memory.
//
// A tensor is cut into chunks, a chunk into one shard per owner. Contributions travel to a shard's
// owner, results from the owner to everyone. The operations of different chunks are interleaved so
// that while one chunk is encoded others are on the wire; run in order, they never deadlock, and
// the receives of a pair of ranks come in the order of its sends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cccl {

enum class Collective : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kSend,  // as kBroadcast, but the root keeps its own values: it writes no output
};
enum class Algorithm : std::uint8_t { kTwoShot, kOneShot };

const char* name_of(Collective collective);
inline bool has_root(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kSend;
}
const char* name_of(Algorithm algorithm);

// Payload buffers of one chunk, one per rank of each kind.
enum class Buffer : std::uint8_t {
  kOutgoing,      // [r]: this rank's contribution to owner r
  kContribution,  // [r]: rank r's contribution to this rank's shard
  kResult,        // [r]: owner r's reduced shard
};

enum class OpKind : std::uint8_t {
  kReceive,  // post a receive into the buffer from `peer`
  kSend,     // post a send of the buffer to `peer`
  kAwait,    // wait for all transfers of the buffer
  kEncode,   // values of the segment -> buffer, with the contribution codec
  kPublish,  // the same with the result codec
  kReduce,   // all contributions -> buffer, encoded with the result codec
  kDeliver,  // all contributions -> values of the output segment
  kDecode,   // buffer -> values of the output segment
};

struct Segment {
  std::size_t offset = 0, count = 0;  // values
};

struct Op {
  OpKind kind;
  Buffer buffer;
  int index;          // which rank's buffer
  int peer;           // of kReceive and kSend
  std::size_t chunk;  // its buffers are those of slot chunk % depth
  Segment values;     // where in the input (kEncode, kPublish) or the output (kDeliver, kDecode)
  std::size_t count;  // values that the payload holds
  std::uint64_t position;  // of the payload's first value, for stochastic rounding
};

struct PlanArgs {
  Collective collective;
  Algorithm algorithm = Algorithm::kTwoShot;
  int rank = 0, size = 1, root = 0;
  std::vector<std::size_t> counts;  // values per rank (reduce_scatter, all_gather), else {total}
  std::size_t chunk = 0;            // values, a multiple of granularity
  std::size_t granularity = 1;      // shards begin at multiples of it
  std::size_t window = 2;           // chunks between a post and its wait
  std::size_t receive_ahead = 1;    // chunks that a receive is posted before its matching send
  bool in_place = false;            // payloads are read where their sender has them
};

class Plan {
 public:
  explicit Plan(PlanArgs args);

  const PlanArgs& args() const { return args_; }
  std::size_t chunks() const { return chunks_; }
  std::size_t steps() const;
  std::size_t depth() const;  // chunks whose buffers are in use at once

  // The operations of one pipeline step, in order.
  std::vector<Op> step(std::size_t step) const;

  // The values whose results this rank makes, in all chunks.
  std::size_t owned() const;

  // The largest payload of any buffer, in values.
  std::size_t max_shard() const;

 private:
  Segment shard(std::size_t chunk, int owner) const;
  void contribute(std::size_t chunk, std::vector<Op>& ops) const;
  void reduce(std::size_t chunk, std::vector<Op>& ops) const;
  void collect(std::size_t chunk, std::vector<Op>& ops) const;
  void receive_contributions(std::size_t chunk, std::vector<Op>& ops) const;
  void receive_results(std::size_t chunk, std::vector<Op>& ops) const;

  PlanArgs args_;
  std::size_t chunks_ = 0;
  std::vector<std::size_t> starts_;  // of each rank's values in the gathered tensor
};

}  // namespace cccl
