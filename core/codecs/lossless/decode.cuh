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

// Bytes of a body, and of a block in it: what its rows of the directory say, where there are such.
struct Extent {
  std::uint64_t begin, end;
};
struct Rows {
  std::uint32_t begin, end;
};

template <bool kWhole>
__device__ inline Rows read_rows(const std::byte* body, std::uint64_t block, bool last) {
  Rows rows{};
  if (block > 0) rows.begin = read_word<kWhole>(body + 4 * (block - 1));
  if (!last) rows.end = read_word<kWhole>(body + 4 * block);
  return rows;
}

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 4 : 5)
    decode_blocks(__grid_constant__ const DecodeTask task, __grid_constant__ const Sources sources,
                  Workspace* workspace, Report* report) {
  constexpr int kShift = std::is_same_v<T, float> ? 23 : std::is_same_v<T, Half> ? 10 : 7;
  constexpr std::uint32_t kMost = std::is_same_v<T, Half> ? 31 : 255;
  // The table's exponents where even and odd values have them; none for other ranks.
  __shared__ std::uint32_t tail[kTailWords + 4], table[2][16];
  __shared__ QuadTable spread;
  __shared__ OfWarps sums[kPlanes];
  __shared__ std::uint64_t body_bytes;
  __shared__ Extent extents[2];  // of this block in the body, and of the next
  const int t = static_cast<int>(threadIdx.x);
  const InFront in_front;
  load(kSpread, spread);
  if (t < 32) table[t / 16][t % 16] = 0;
  begin();
  Totals totals = inspect(sources, report);
  const std::byte* const body = sources.payloads[0] + sizeof(PayloadHeader);
  const auto is_last = [&](std::uint64_t block) { return block == task.blocks - 1; };
  const auto extent_of = [&](std::uint64_t block, const Rows& rows) {
    if (block > 0) totals.read += checksum_at(4 * (block - 1), rows.begin);
    return Extent{block > 0 ? std::uint64_t{rows.begin} * kUnit : task.directory,
                  is_last(block) ? body_bytes : std::uint64_t{rows.end} * kUnit};
  };
  if (t == 0) {  // It may be anything: never more than there is.
    body_bytes = min(read_header(sources.payloads[0]).body_bytes, sources.expected.body_bytes);
    extents[0] =
        task.directory > body_bytes
            ? Extent{body_bytes, body_bytes}
            : extent_of(blockIdx.x, read_rows<false>(body, blockIdx.x, is_last(blockIdx.x)));
  }
  int turn = 0;
  // Of a thread block. False if it is damaged.
  const auto decode = [&]<bool kWhole>(std::bool_constant<kWhole>, std::uint64_t block) {
    const auto [from, to] = extents[turn];
    const bool last = is_last(block);
    const std::uint64_t first = block * kBlock, next = block + gridDim.x;
    const int n = kWhole ? kBlock : static_cast<int>(min(task.count - first, kBlock));
    const int mine = kWhole ? kPerThread : min(max(n - kPerThread * t, 0), kPerThread);
    const Places<T> places(n);
    constexpr int kSize = sizeof(T);
    std::byte* const out = task.values + (first + kPerThread * t) * kSize;
    const std::byte* const in = body + from;
    std::uint32_t words[kWords<T>];
    const bool has_next = t == kLanes && next < task.blocks;
    Rows rows{};
    if (!(from >= task.directory && to >= from && to <= body_bytes)) return false;
    if (has_next) rows = read_rows<kWhole>(body, next, is_last(next));
    if (to - from == static_cast<std::uint64_t>(n * kSize)) {  // raw
      read_words(in + kPerThread * t * kSize, mine * kSize, kWhole, words);
      totals.read += checksum_at(from + kPerThread * t * kSize, words);
      write_words(out, mine * kSize, kWhole, words);
      if (has_next) extents[turn ^ 1] = extent_of(next, rows);
      return true;
    }
    if (to - from > static_cast<std::uint64_t>(n * kSize) || to - from < places.tail) return false;
    const int bytes = static_cast<int>(to - from), tail_words = (bytes - places.tail) / 4;

    // All that is read, before anything is done with it.
    Rest<T> rest{};
    rest.for_parts(places, t, [&](int offset, auto& part, int valid) {
      if constexpr (sizeof(part) % 16 == 0)
        read_words(in + offset, valid, kWhole, part);
      else if (valid)
        part[0] = read_word<kWhole>(in + offset);
    });
    const bool has_signs =
        std::is_same_v<T, Half> && t % 2 == 0 && places.signs + 2 * t < places.table;
    std::uint32_t signs = 0, four = 0, digits = 0;
    if (has_signs) signs = read_word<kWhole>(in + places.signs + 2 * t);
    if (t < kTable / 4) four = read_word<kWhole>(in + places.table + 4 * t);
    if (mine) digits = read_word<kWhole>(in + places.plane + 4 * t);
    for (int i = t; i < tail_words; i += kThreads) {
      tail[i] = read_word<kWhole>(in + places.tail + 4 * i);
      totals.read += checksum_at(from + places.tail + 4 * i, tail[i]);
    }
    if (t < kTable / 4) {
      totals.read += checksum_at(from + places.table + 4 * t, four);
      for (int b = 0; b < 4; ++b) {
        const std::uint32_t exponent = (four >> 8 * b & kMost) << kShift;
        table[0][4 * t + b] = exponent;
        table[1][4 * t + b] = kSize == 2 ? exponent << 16 : exponent;
      }
    }
    if (mine) totals.read += checksum_at(from + places.plane + 4 * t, digits);
    if (mine < kPerThread) digits &= (1u << 2 * (mine & 15)) - 1;

    // Ranks, the sums of digits: of even values and of odd ones, eight to a word.
    std::uint32_t even = 0, odd = 0, more = 0;
    int at = 0, escape = 0;
    bool whole = bytes % 4 == 0;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      even += digits & 0x33333333u;
      odd += digits >> 2 & 0x33333333u;
      more = threes(digits);
      const std::uint32_t count = __popc(more), upto = sum_of_lanes(count);
      if (lane_id() == kLanes - 1) sums[p].counts[t / kLanes] = static_cast<std::uint16_t>(upto);
      if (p == 1 && has_next) extents[turn ^ 1] = extent_of(next, rows);
      __syncthreads();
      const int before = in_front.before(sums[p], upto - count), all = InFront::all(sums[p]);
      if (p < kPlanes - 1) {
        const int digit = at * 16 + before;
        at += (all + 15) / 16;
        whole &= at <= tail_words;
        digits = 0;
        if (whole)
          digits = spread_digits(
              __funnelshift_r(tail[digit / 16], tail[digit / 16 + 1], 2 * (digit % 16)),
              Quads(more), spread);
      } else {
        escape = before;
        const int end = places.tail + 4 * at + (all + 3) / 4 * 4;
        whole &= bytes == (last ? end : static_cast<int>((end + kUnit - 1) / kUnit * kUnit));
      }
    }
    if (!whole) return false;
    if (next < task.blocks) {
      const auto [following, end] = extents[turn ^ 1];
      const std::uint64_t line = following + kLineBytes * t;
      if (line < end && end <= body_bytes) prefetch(body + line);
    }

    if (has_signs) totals.read += checksum_at(from + places.signs + 2 * t, signs);
    if constexpr (std::is_same_v<T, Half>)
      rest.signs = __shfl_sync(~0u, signs, lane_id() & ~1) >> 16 * (t % 2) & 0xFFFF;
    rest.for_parts(places, t, [&](int offset, const auto& part, int) {
      totals.read += checksum_at(from + offset, part);
    });
    rest.give(words);
    const auto exponent_of = [&](int i) {
      return table[i % 2][(i % 2 ? odd : even) >> i / 2 * 4 & 15];
    };
#pragma unroll
    for (int i = 0; i < kPerThread; i += 2) {
      if constexpr (kSize == 4)
        words[i] |= exponent_of(i), words[i + 1] |= exponent_of(i + 1);
      else
        words[i / 2] |= exponent_of(i) | exponent_of(i + 1);
    }
    const auto* const escapes = reinterpret_cast<const std::uint8_t*>(tail + at);
    for (; more; more &= more - 1) {  // exponents that are not in the table
      const unsigned int bit = 4 * sizeof(T) * (__ffs(more) - 1);
      const std::uint32_t exponent = (escapes[escape++] & kMost) << kShift << bit % 32;
#pragma unroll
      for (int w = 0; w < kWords<T>; ++w)  // no index that is known late: they are registers
        words[w] |= exponent & (bit / 32 == w ? ~0u : 0u);
    }
    if constexpr (kWhole)
      write_pairwise(out, words);
    else
      write_words(out, mine * kSize, false, words);
    return true;
  };
  for (std::uint64_t block = blockIdx.x; block < task.blocks; block += gridDim.x, turn ^= 1) {
    __syncthreads();  // with shared memory
    const bool well = task.aligned && task.count - block * kBlock >= kBlock
                          ? decode(std::true_type{}, block)
                          : decode(std::false_type{}, block);
    if (!well) {
      totals.flags |= kReported;
      if (t == 0) report->damaged = 1;
      break;
    }
    if (is_last(block))  // what fills the directory up
      for (std::uint64_t at = 4 * block + 4 * t; at < task.directory; at += 4 * kThreads)
        totals.read += checksum_at(at, read_word<false>(body + at));
  }
  finish(workspace, totals, report, nullptr);
}

}  // namespace cccl::lossless
