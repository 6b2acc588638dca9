// The kernel that encodes: a thread block takes blocks of values, one after the other.
#pragma once

#include "codecs/lossless/lossless.cuh"
#include "devices/cuda/kernels.cuh"

namespace cccl::lossless {

// Memory of one encode, zero at first.
struct Control {
  std::uint64_t body_bytes;
  unsigned int next;  // block to be taken
};

// How far the bodies of blocks are known, in units: a value, and what it is.
enum Known : std::uint64_t { kNothing = 0, kOwn = 1, kSumSoFar = 2 };

// The units of all blocks in front of this one, for the first warp; the others' are published as
// they become known. Blocks are taken in order, so that none waits for one that nobody has.
__device__ inline std::uint64_t units_before(volatile unsigned long long* known,
                                             std::uint64_t block, std::uint64_t units) {
  if (block == 0) {
    if (lane_id() == 0) known[0] = units << 2 | kSumSoFar;
    return 0;
  }
  std::uint64_t sum = 0;
  for (std::int64_t last = static_cast<std::int64_t>(block) - 1;; last -= kLanes) {
    const std::int64_t at = last - lane_id();
    std::uint64_t found;
    do {
      found = at >= 0 ? known[at] : kSumSoFar;
    } while (__any_sync(~0u, (found & 3) == kNothing));
    const unsigned int sums = __ballot_sync(~0u, (found & 3) == kSumSoFar);
    const int nearest = sums ? __ffs(sums) - 1 : kLanes - 1;
    std::uint64_t part = lane_id() <= nearest ? found >> 2 : 0;
    for (int step = kLanes / 2; step > 0; step /= 2) part += __shfl_xor_sync(~0u, part, step);
    sum += part;
    if (sums) break;
  }
  if (lane_id() == 0) known[block] = (sum + units) << 2 | kSumSoFar;
  return sum;
}

// Of the exponents counted: the most common ones into `table`, and the digits of all into `digits`.
__device__ inline void make_table(std::uint32_t (&counts)[256], std::uint32_t (&keys)[256],
                                  unsigned int& found, std::uint8_t (&table)[kTable],
                                  std::uint8_t (&digits)[256]) {
  const std::uint32_t t = threadIdx.x, key = counts[t] << 8 | (255 - t);
  if (t < kTable) table[t] = 0;
  if (key >> 8) keys[atomicAdd(&found, 1u)] = key;
  counts[t] = 0;
  __syncthreads();
  int rank = key >> 8 ? 0 : kTable;
  for (unsigned int i = 0; i < found && rank < kTable; ++i) rank += keys[i] > key;
  digits[t] = static_cast<std::uint8_t>(digits_of(rank));
  if (rank < kTable) table[rank] = static_cast<std::uint8_t>(t);
  __syncthreads();
  if (t == 0) found = 0;
}

struct EncodeTask {
  const std::byte* values;
  std::uint64_t count, blocks, directory;  // values, blocks, bytes
  int sampled;                             // one exponent of so many is counted
  bool aligned;                            // values and payload, for the widest accesses
  Control* control;
  unsigned long long* known;  // of each block
};

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 4)
    encode_blocks(__grid_constant__ const EncodeTask task, __grid_constant__ const Seal seal,
                  __grid_constant__ const Sources sources, Workspace* workspace) {
  __shared__ std::uint32_t counts[256], keys[256], tail[kTailWords + 2];
  __shared__ std::uint8_t table[kTable], digits[256];
  __shared__ Counts sums[kWarps];
  __shared__ unsigned int found, taken;
  __shared__ std::uint64_t place;
  const int t = static_cast<int>(threadIdx.x);
  begin();
  Totals totals = inspect(sources, nullptr);  // for their flags: sums of them are encoded here
  const WordWriter out{seal.payload + sizeof(PayloadHeader),
                       reinterpret_cast<std::uintptr_t>(seal.payload) % 4 == 0};
  counts[t] = 0;
  if (t == 0) found = 0, taken = atomicAdd(&task.control->next, 1u);
  __syncthreads();
  for (std::uint64_t block = taken; block < task.blocks; block = taken) {
    const std::uint64_t first = block * kBlock, left = task.count - first;
    const int n = static_cast<int>(left < kBlock ? left : kBlock);
    const bool last = block == task.blocks - 1, vector = task.aligned && n == kBlock;
    const int mine = min(max(n - kPerThread * t, 0), kPerThread);  // values
    const std::byte* const from = task.values + (first + kPerThread * t) * sizeof(T);
    std::uint32_t words[kWords<T>];
    read_words(from, mine * static_cast<int>(sizeof(T)), vector, words);
    for (int i = t; i < kTailWords + 2; i += kThreads) tail[i] = 0;

    bool special = false;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const std::uint32_t exponent = exponent_at<T>(words, i);
      special |= exponent == (std::is_same_v<T, Half> ? 31 : 255);
      if (i < mine && (i % kSampled == 0 || task.sampled == 1)) atomicAdd(&counts[exponent], 1u);
    }
    if (special) totals.flags |= kFoundNonFinite;
    __syncthreads();
    make_table(counts, keys, found, table, digits);

    // Digits of each plane, with none left out.
    std::uint32_t planes[kPlanes] = {};
#pragma unroll
    for (int four = 0; four < kPerThread; four += 4) {
      std::uint32_t bytes = 0;
#pragma unroll
      for (int i = four; i < four + 4; ++i)
        if (i < mine) bytes |= std::uint32_t{digits[exponent_at<T>(words, i)]} << 8 * (i - four);
#pragma unroll
      for (int p = 0; p < kPlanes; ++p)  // the product's top byte has all four
        planes[p] |= (bytes >> 2 * p & 0x03030303u) * 0x01041040u >> 24 << 2 * four;
    }
    std::uint32_t left_over[kPlanes];  // places of values that have more digits
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) left_over[p] = threes(planes[p]);
    Counts before, all;
    scan({static_cast<std::uint32_t>(__popc(left_over[0]) | __popc(left_over[1]) << 16),
          static_cast<std::uint32_t>(__popc(left_over[2]) | __popc(left_over[3]) << 16)},
         sums, before, all);

    const Places<T> places(n);
    int begins[kPlanes + 1];  // of planes 1 to 3, the escapes and the end, in the tail's words
    begins[0] = 0;
#pragma unroll
    for (int p = 1; p < kPlanes; ++p) begins[p] = begins[p - 1] + (all.at(p - 1) + 15) / 16;
    begins[kPlanes] = begins[kPlanes - 1] + (all.at(kPlanes - 1) + 3) / 4;
    const int raw_bytes = n * static_cast<int>(sizeof(T));
    const int coded_bytes = places.tail + 4 * begins[kPlanes];
    // A block as long as its values, filled up, is taken for them.
    const bool coded = in_units(coded_bytes) < static_cast<std::size_t>(raw_bytes);
    const int bytes = coded ? coded_bytes : raw_bytes;
    const std::uint64_t units = (bytes + kUnit - 1) / kUnit;
    if (t == 0 && block > 0)
      *reinterpret_cast<volatile unsigned long long*>(task.known + block) = units << 2 | kOwn;

    if (coded) {
#pragma unroll
      for (int p = 1; p < kPlanes; ++p) {
        const std::uint32_t held = gather_digits(planes[p], left_over[p - 1]);
        const int digit = before.at(p - 1), shift = 2 * (digit % 16);
        const int at = begins[p - 1] + digit / 16;
        if (held << shift) atomicOr(&tail[at], held << shift);
        if (shift && held >> (32 - shift)) atomicOr(&tail[at + 1], held >> (32 - shift));
      }
      auto* const escapes = reinterpret_cast<std::uint8_t*>(tail + begins[kPlanes - 1]);
      int at = before.at(kPlanes - 1);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
        if (left_over[kPlanes - 1] >> 2 * i & 1)
          escapes[at++] = static_cast<std::uint8_t>(exponent_at<T>(words, i));
    }
    if (t < kLanes) {
      const std::uint64_t units_in_front = units_before(task.known, block, units);
      if (t == 0) {
        place = task.directory + units_in_front * kUnit;
        taken = atomicAdd(&task.control->next, 1u);
      }
    }
    __syncthreads();

    const std::uint64_t begins_at = place, ahead = taken * std::uint64_t{kBlock} + kPerThread * t;
    if (t % (kLineBytes / (kPerThread * sizeof(T))) == 0 && ahead < task.count)
      prefetch(task.values + ahead * sizeof(T));
    if (coded) {
      Rest<T> rest;
      rest.take(words);
      rest.for_parts(places, t, [&](int offset, const auto& part, int valid) {
        constexpr bool kWide = sizeof(part) % 16 == 0;
        if constexpr (kWide)
          write_words(out.body + begins_at + offset, valid, vector, part);
        else if (valid)
          out.word(begins_at + offset, part[0], totals.written);
        if constexpr (kWide) totals.written += checksum_at(begins_at + offset, part);
      });
      if constexpr (std::is_same_v<T, Half>) {  // two threads' signs are a word
        const std::uint32_t other = __shfl_down_sync(~0u, rest.signs, 1);
        if (t % 2 == 0 && places.signs + 2 * t < places.table)
          out.word(begins_at + places.signs + 2 * t, rest.signs | other << 16, totals.written);
      }
      if (t < kTable / 4) {
        std::uint32_t word = 0;
        for (int b = 0; b < 4; ++b) word |= std::uint32_t{table[4 * t + b]} << 8 * b;
        out.word(begins_at + places.table + 4 * t, word, totals.written);
      }
      if (mine) out.word(begins_at + places.plane + 4 * t, planes[0], totals.written);
      for (int i = t; i < begins[kPlanes]; i += kThreads)
        out.word(begins_at + places.tail + 4 * i, tail[i], totals.written);
      if (!last && t < (units * kUnit - bytes) / 4)
        out.word(begins_at + bytes + 4 * t, 0, totals.written);
    } else {
      write_words(out.body + begins_at + kPerThread * t * sizeof(T),
                  mine * static_cast<int>(sizeof(T)), vector, words);
      totals.written += checksum_at(begins_at + kPerThread * t * sizeof(T), words);
    }
    if (t == 0 && block > 0)
      out.word(4 * (block - 1), static_cast<std::uint32_t>(begins_at / kUnit), totals.written);
    if (last) {
      for (std::uint64_t at = 4 * block + 4 * t; at < task.directory; at += 4 * kThreads)
        out.word(at, 0, totals.written);
      if (t == 0) task.control->body_bytes = begins_at + bytes;
    }
    __syncthreads();  // before shared memory is used for the next
  }
  finish(workspace, totals, nullptr, &seal, &task.control->body_bytes);
}

}  // namespace cccl::lossless
