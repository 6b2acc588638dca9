// What the blocks of a kernel add up, and what the last of them does with it: the header of a
// payload is written, and those of others are checked, without the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api/payload.h"
#include "devices/cuda/queue.h"
#include "devices/cuda/tile.cuh"

namespace cccl::cuda {

inline constexpr int kThreads = 256, kWarps = kThreads / kLanes;
inline constexpr int kMaxSources = 64;

// The payload to write. `header` lacks what the values decide.
struct Seal {
  std::byte* payload;
  PayloadHeader header;
  bool with_checksum;
};

// The payloads to read, and the header that each must have in front but for flags and checksum.
struct Sources {
  const std::byte* payloads[kMaxSources];
  int count;
  PayloadHeader expected;
  bool any_size;  // expected.body_bytes is the most that a body may have
};

// The parts of a launch, of which a block belongs to one.
template <class Part>
struct Parts {
  Part parts[kMostParts];
  __device__ const Part& mine() const { return parts[blockIdx.y]; }
};

enum Flags : unsigned int { kFoundNonFinite = 1, kNoChecksum = 2, kReported = 4, kOriginShift = 8 };

// `read` is a checksum less the one announced, so 0 if all is well.
struct Totals {
  std::uint64_t read, written;
  unsigned int flags;
};

using HeaderWords = std::array<std::uint32_t, sizeof(PayloadHeader) / 4>;

__device__ inline PayloadHeader read_header(const std::byte* payload) {
  HeaderWords words;
  const bool aligned = reinterpret_cast<std::uintptr_t>(payload) % 4 == 0;
  for (int i = 0; i < static_cast<int>(words.size()); ++i) {
    const std::byte* const at = payload + 4 * i;
    words[i] = aligned
                   ? *reinterpret_cast<const std::uint32_t*>(at)
                   : static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8 |
                         static_cast<std::uint32_t>(at[2]) << 16 |
                         static_cast<std::uint32_t>(at[3]) << 24;
  }
  return std::bit_cast<PayloadHeader>(words);
}

__device__ inline bool is_as_expected(const PayloadHeader& found, const PayloadHeader& expected,
                                      bool any_size) {
  bool same = found.magic == expected.magic && found.version == expected.version &&
              found.codec == expected.codec && found.dtype == expected.dtype &&
              found.count == expected.count;
  same &=
      any_size ? found.body_bytes <= expected.body_bytes : found.body_bytes == expected.body_bytes;
  for (int i = 0; i < 4; ++i) same &= found.params[i] == expected.params[i];
  return same && found.header_check == header_check(found);
}

// The last warp of all, which never has more tiles than others, looks at the headers of `count`
// payloads: what their checksums and flags contribute. A wrong header is reported at once.
__device__ inline Totals inspect(const std::byte* const* payloads, int count,
                                 const PayloadHeader& expected, Report* report,
                                 bool any_size = false) {
  Totals totals{};
  if (blockIdx.x != gridDim.x - 1 || threadIdx.x < kThreads - kLanes) return totals;
  for (int first = 0; first < count; first += kLanes) {
    const int i = first + lane_id();
    const bool mine = i < count;
    PayloadHeader header{};
    if (mine) header = read_header(payloads[i]);
    const bool wrong = mine && !is_as_expected(header, expected, any_size);
    if (mine && (header.flags & kHasChecksum))
      totals.read -= header.checksum;
    else if (mine)
      totals.flags |= kNoChecksum;
    const unsigned int bad = __ballot_sync(~0u, mine && (header.flags & kHasNonFinite));
    if (bad && !(totals.flags >> kOriginShift))
      totals.flags |= static_cast<unsigned int>(first + __ffs(bad)) << kOriginShift;
    if (wrong && report) {
      totals.flags |= kReported;
      report[blockIdx.y].damaged = i + 1;
    }
    if (bad && report && lane_id() == __ffs(bad) - 1) {
      const unsigned int alone = count == 1 ? kUnknownSource : i + 1;
      const unsigned int source = header.origin ? header.origin : alone;
      auto& found = report[blockIdx.y].non_finite;
      const unsigned int before = found;
      if (before == 0 || source < before) found = source;
    }
  }
  return totals;
}

__device__ inline Totals inspect(const Sources& sources, Report* report) {
  return inspect(sources.payloads, sources.count, sources.expected, report, sources.any_size);
}

__device__ inline void write_header(const Seal& seal, const Totals& totals,
                                    const std::uint64_t* body_bytes) {
  __shared__ HeaderWords words;
  if (threadIdx.x == 0) {
    PayloadHeader header = seal.header;
    if (body_bytes) header.body_bytes = *body_bytes;
    if (!header.origin) header.origin = totals.flags >> kOriginShift;
    if (header.origin || (totals.flags & kFoundNonFinite)) header.flags |= kHasNonFinite;
    if (seal.with_checksum) {
      header.flags |= kHasChecksum;
      header.checksum = totals.written;
    }
    header.header_check = header_check(header);
    words = std::bit_cast<HeaderWords>(header);
  }
  __syncthreads();
  if (threadIdx.x < sizeof words)
    seal.payload[threadIdx.x] = reinterpret_cast<const std::byte*>(&words)[threadIdx.x];
}

__device__ inline Totals sum_of_block(Totals mine) {
  __shared__ Totals of_warps[kWarps];
  for (int step = kLanes / 2; step > 0; step /= 2) {
    mine.read += __shfl_xor_sync(~0u, mine.read, step);
    mine.written += __shfl_xor_sync(~0u, mine.written, step);
  }
  mine.flags = __reduce_or_sync(~0u, mine.flags);
  if (lane_id() == 0) of_warps[threadIdx.x / kLanes] = mine;
  __syncthreads();
  Totals sum{};
  if (threadIdx.x == 0)
    for (const Totals& part : of_warps) {
      sum.read += part.read;
      sum.written += part.written;
      sum.flags |= part.flags;
    }
  return sum;
}

// Counts this block as done; true for the last. What the thread wrote before is seen by it.
__device__ inline bool is_last_block(Workspace* workspace) {
  unsigned int before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(&workspace->done)
               : "memory");
  return before == gridDim.x - 1;
}

// Adds this block's totals to its part's workspace. The last block judges what was read, seals what
// was written, and leaves the workspace all zero. `body_bytes`: where a block has written how many
// the body has, if the header in `seal` does not say.
__device__ inline void finish(Workspace* workspaces, const Totals& mine, Report* report,
                              const Seal* seal, const std::uint64_t* body_bytes = nullptr) {
  Workspace* const workspace = workspaces + blockIdx.y;
  __shared__ bool last;
  __shared__ Totals all;
  const Totals block = sum_of_block(mine);
  if (threadIdx.x == 0) {
    if (report) atomicAdd(&workspace->read, block.read);
    if (seal) atomicAdd(&workspace->written, block.written);
    if (block.flags) atomicOr(&workspace->flags, block.flags);
    last = is_last_block(workspace);
    if (last) {
      all.read = atomicExch(&workspace->read, 0ull);
      all.written = atomicExch(&workspace->written, 0ull);
      all.flags = atomicExch(&workspace->flags, 0u);
      workspace->done = 0;
      if (report && all.read != 0 && !(all.flags & (kNoChecksum | kReported)))
        report[blockIdx.y].damaged = kUnknownSource;
    }
  }
  __syncthreads();
  if (last && seal) write_header(*seal, all, body_bytes);
}

}  // namespace cccl::cuda
