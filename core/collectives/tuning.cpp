#include "collectives/tuning.h"

#include <algorithm>
#include <numeric>

namespace cccl {
namespace {

// `least` and `most` are of a shard's payload, so of a message; `chunk_least` and `chunk_most` are
// of all shards of a chunk: memory in flight must not grow with the number of ranks.
struct Sizes {
  std::size_t least, most, chunk_least, chunk_most;
};
// A message over sockets costs about 40 us of CPU at either end: below 64 kB that takes over on a
// 1 Gbit/s link, and the faster the link, the larger. Large chunks give several threads enough to
// do. (docs/performance.md has the measurements.)
constexpr Sizes kSingly{64 * 1024, 2 * 1024 * 1024, 0, 4 * 1024 * 1024};
// A group of NCCL's costs the host as much, and the device, where it starts, 100 us; a device's
// codec takes so little time that few chunks hide it. Whatever is sent in it, a chunk costs the
// host 45 us. (docs/gpu.md)
constexpr Sizes kInGroups{1024 * 1024, 2 * 1024 * 1024, 3 * 1024 * 1024, 8 * 1024 * 1024};
// Where payloads are read in place, codecs and link work at once within a chunk: chunks only bound
// the memory. (docs/gpu.md)
constexpr Sizes kInPlace{64 * 1024 * 1024, 64 * 1024 * 1024, 0, 256 * 1024 * 1024};
// More chunks hide no more of the pipeline's filling and draining.
constexpr std::size_t kChunks = 12;
// What one-shot may send per rank: it saves a round trip but sends everything to everyone.
constexpr std::size_t kOneShotBytes = 32 * 1024;
constexpr std::size_t kWindow = 2, kWindowInPlace = 1;

std::size_t round_up(std::size_t n, std::size_t granularity) {
  return std::max<std::size_t>(1, (n + granularity - 1) / granularity) * granularity;
}

}  // namespace

PlanArgs tune(PlanArgs args, const Tuning& tuning, const Codec& contribution, const Codec& result,
              DType dtype, std::size_t residual_granularity) {
  args.granularity =
      std::lcm(std::lcm(contribution.granularity(), result.granularity()), residual_granularity);
  const std::size_t window = args.in_place ? kWindowInPlace : kWindow;
  args.window = tuning.window ? tuning.window : window;
  const std::size_t ranks = static_cast<std::size_t>(args.size);
  const std::size_t most = args.counts.empty() ? 0 : *std::ranges::max_element(args.counts);
  const std::size_t payload =
      std::max(contribution.max_encoded_bytes(most, dtype), result.max_encoded_bytes(most, dtype));
  if (args.collective == Collective::kAllReduce)
    args.algorithm = tuning.algorithm.value_or(
        payload * (ranks - 1) <= kOneShotBytes ? Algorithm::kOneShot : Algorithm::kTwoShot);
  // Shards of a chunk, and how many of them the values of `most` are cut into.
  const bool split = args.counts.size() == 1 && args.algorithm == Algorithm::kTwoShot;
  const std::size_t owners =
      has_root(args.collective) ? std::max<std::size_t>(1, ranks - 1) : ranks;
  const std::size_t shards = split ? owners : 1;
  if (tuning.chunk_bytes) {
    const std::size_t values = tuning.chunk_bytes / size_of(dtype);
    args.chunk = split ? values : values / owners;
  } else {
    // As many chunks as make a shard's payload about the target, all of one size.
    const std::size_t wanted = payload / (shards * kChunks);
    const auto& sizes = args.in_place ? kInPlace : args.receive_ahead ? kSingly : kInGroups;
    const std::size_t least =
        std::min(std::max(sizes.least, sizes.chunk_least / owners), sizes.most);
    const std::size_t target =
        std::min(std::clamp(wanted, least, sizes.most), sizes.chunk_most / owners);
    const std::size_t chunks = std::max<std::size_t>(1, payload / (shards * target));
    args.chunk = (most + chunks - 1) / chunks;
  }
  args.chunk = round_up(args.chunk, args.granularity * shards);
  return args;
}

}  // namespace cccl
