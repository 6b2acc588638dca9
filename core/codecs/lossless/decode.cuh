// The kernel that decodes: a thread block has blocks of values, which the directory finds.
#pragma once

#include "codecs/lossless/lossless.cuh"
#include "devices/cuda/kernels.cuh"

namespace cccl::lossless {

struct DecodeTask {
  std::byte* values;
  std::uint64_t count, blocks, directory;
  bool aligned;  // values and payload
};

// Stores a thread's words so that two neighbours fill a sector of 32 bytes at once.
template <int kCount>
__device__ inline void write_pairwise(std::byte* at, std::uint32_t (&words)[kCount]) {
  const bool odd = lane_id() % 2;
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
#pragma unroll
    for (int w = i; w < i + 4; ++w) {  // the even one's second chunk for the odd one's first
      const std::uint32_t other = __shfl_xor_sync(~0u, odd ? words[w] : words[w + 4], 1);
      (odd ? words[w] : words[w + 4]) = other;
    }
    // Chunks 0 and 1 of the even lane, then those of the odd one.
    std::byte* const even = at + 4 * i - (odd ? 4 * kCount : 0);
    const int own = odd ? 16 : 0;
    const std::uint32_t* const w = words + i;
    __stcs(reinterpret_cast<uint4*>(even + own), uint4{w[0], w[1], w[2], w[3]});
    __stcs(reinterpret_cast<uint4*>(even + 4 * kCount + own), uint4{w[4], w[5], w[6], w[7]});
  }
}

// Bytes of a body.
struct Extent {
  std::uint64_t begin, end;
};

// Of a block. What the directory says is checked when it is used.
__device__ inline Extent extent_of(std::uint64_t block, const DecodeTask& task,
                                   const WordReader& in, std::uint64_t body_bytes,
                                   std::uint64_t& sum) {
  Extent found{task.directory, body_bytes};
  if (task.directory > body_bytes) return found;
  std::uint64_t ignored = 0;
  if (block > 0) found.begin = std::uint64_t{in.word(4 * (block - 1), sum)} * kUnit;
  if (block + 1 < task.blocks) found.end = std::uint64_t{in.word(4 * block, ignored)} * kUnit;
  return found;
}

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 4 : 5)
    decode_blocks(__grid_constant__ const DecodeTask task, __grid_constant__ const Sources sources,
                  Workspace* workspace, Report* report) {
  __shared__ std::uint32_t tail[kTailWords + 4], table[kTable + 1];
  __shared__ Counts sums[kPlanes][kWarps];
  __shared__ std::uint64_t body_bytes;
  __shared__ Extent extents[2];  // of this block in the body, and of the next
  const int t = static_cast<int>(threadIdx.x);
  begin();
  Totals totals = inspect(sources, report);
  const std::byte* const payload = sources.payloads[0];
  const WordReader in{payload + sizeof(PayloadHeader),
                      reinterpret_cast<std::uintptr_t>(payload) % 4 == 0};
  if (t == 0) {
    // It may be anything: never more than there is.
    body_bytes = min(read_header(payload).body_bytes, sources.expected.body_bytes);
    table[kTable] = 0;
    extents[0] = extent_of(blockIdx.x, task, in, body_bytes, totals.read);
  }
  const auto damaged = [&] {
    totals.flags |= kReported;
    if (t == 0) report->damaged = 1;
  };
  int turn = 0;
  for (std::uint64_t block = blockIdx.x; block < task.blocks; block += gridDim.x, turn ^= 1) {
    const bool last = block == task.blocks - 1;
    __syncthreads();  // with shared memory
    const auto [from, to] = extents[turn];
    const std::uint64_t first = block * kBlock, left = task.count - first;
    const std::uint64_t next = block + gridDim.x;
    if (t == kLanes && next < task.blocks)
      extents[turn ^ 1] = extent_of(next, task, in, body_bytes, totals.read);
    if (last && task.directory <= body_bytes)
      for (std::uint64_t at = 4 * block + 4 * t; at < task.directory; at += 4 * kThreads)
        in.word(at, totals.read);
    const int n = static_cast<int>(left < kBlock ? left : kBlock);
    const int mine = min(max(n - kPerThread * t, 0), kPerThread);
    const int raw_bytes = n * static_cast<int>(sizeof(T));
    const Places<T> places(n);
    const bool inside = from >= task.directory && to >= from && to <= body_bytes;
    const bool raw = inside && to - from == raw_bytes;
    if (!raw && !(inside && to - from < raw_bytes && to - from >= places.tail)) {
      damaged();
      continue;
    }
    const int bytes = static_cast<int>(to - from), mine_bytes = mine * static_cast<int>(sizeof(T));
    const bool vector = task.aligned && n == kBlock;
    std::byte* const out = task.values + (first + kPerThread * t) * sizeof(T);
    std::uint32_t words[kWords<T>];
    if (raw) {
      const std::uint64_t at = from + kPerThread * t * sizeof(T);
      read_words(in.body + at, mine_bytes, vector, words);
      totals.read += checksum_at(at, words);
      write_words(out, mine_bytes, vector, words);
      continue;
    }

    Rest<T> rest{};
    rest.for_parts(places, t, [&](int offset, auto& part, int valid) {
      constexpr bool kWide = sizeof(part) % 16 == 0;
      if constexpr (kWide) {
        read_words(in.body + from + offset, valid, vector, part);
        totals.read += checksum_at(from + offset, part);
      } else {
        if (valid) part[0] = in.word(from + offset, totals.read);
      }
    });
    if constexpr (std::is_same_v<T, Half>) {
      std::uint32_t both = 0;
      if (t % 2 == 0 && places.signs + 2 * t < places.table)
        both = in.word(from + places.signs + 2 * t, totals.read);
      both = __shfl_sync(~0u, both, lane_id() & ~1);
      rest.signs = both >> 16 * (t % 2) & 0xFFFF;
    }
    constexpr int kShift = std::is_same_v<T, float> ? 23 : std::is_same_v<T, Half> ? 10 : 7;
    constexpr std::uint32_t kMost = std::is_same_v<T, Half> ? 31 : 255;
    if (t < kTable / 4) {
      const std::uint32_t four = in.word(from + places.table + 4 * t, totals.read);
      for (int b = 0; b < 4; ++b) table[4 * t + b] = (four >> 8 * b & kMost) << kShift;
    }
    std::uint32_t digits = mine ? in.word(from + places.plane + 4 * t, totals.read) : 0;
    if (mine < kPerThread) digits &= (1u << 2 * mine) - 1;
    const int tail_words = (bytes - places.tail) / 4;
    for (int i = t; i < tail_words; i += kThreads)
      tail[i] = in.word(from + places.tail + 4 * i, totals.read);

    // Ranks, four to a word: the sums of digits.
    std::uint32_t ranks[4] = {};
    std::uint32_t more = 0;
    int at = 0, escape = 0;
    bool whole = bytes % 4 == 0;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t byte = digits >> 8 * i & 255,
                            spread = (byte | byte << 12) & 0x000F000Fu;
        ranks[i] += (spread | spread << 6) & 0x03030303u;
      }
      more = threes(digits);
      Counts before, all;
      scan({static_cast<std::uint32_t>(__popc(more)), 0}, sums[p], before, all);
      escape = before.at(0);
      if (p < kPlanes - 1) {
        const int digit = at * 16 + before.at(0), shift = 2 * (digit % 16);
        at += (all.at(0) + 15) / 16;
        whole &= at <= tail_words;
        digits = 0;
        if (whole && more)
          digits =
              scatter_digits(__funnelshift_r(tail[digit / 16], tail[digit / 16 + 1], shift), more);
      } else {
        const int end = places.tail + 4 * at + (all.at(0) + 3) / 4 * 4;
        whole &= bytes == (last ? end : static_cast<int>((end + kUnit - 1) / kUnit * kUnit));
      }
    }
    if (!whole) {
      damaged();
      continue;
    }
    if (next < task.blocks) {
      const auto [following, end] = extents[turn ^ 1];
      const std::uint64_t line = following + kLineBytes * t;
      if (line < end && end <= body_bytes) prefetch(in.body + line);
    }

    rest.give(words);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const std::uint32_t exponent = table[ranks[i / 4] >> 8 * (i % 4) & 15];
      if constexpr (std::is_same_v<T, float>)
        words[i] |= exponent;
      else
        words[i / 2] |= exponent << 16 * (i % 2);
    }
    if (more) {  // exponents that are not in the table
      const auto* const escapes = reinterpret_cast<const std::uint8_t*>(tail + at);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (!(more >> 2 * i & 1)) continue;
        const std::uint32_t exponent = (escapes[escape++] & kMost) << kShift;
        if constexpr (std::is_same_v<T, float>)
          words[i] |= exponent;
        else
          words[i / 2] |= exponent << 16 * (i % 2);
      }
    }
    if (vector)
      write_pairwise(out, words);
    else
      write_words(out, mine_bytes, false, words);
  }
  finish(workspace, totals, report, nullptr);
}

}  // namespace cccl::lossless
