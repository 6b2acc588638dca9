// The kernel that encodes: a thread block takes blocks of values, one after the other.
#pragma once

#include "codecs/lossless/lossless.cuh"
#include "devices/cuda/kernels.cuh"
#include "devices/cuda/look_back.cuh"

namespace cccl::lossless {

// Memory of one encode, zero at first.
struct Control {
  std::uint64_t body_bytes;
  unsigned int next;  // block to be taken
};

// Of the exponents counted: the most common ones into `table`, and the digits of all into `digits`.
// `keys` and `found` are zero, and are so afterwards.
__device__ inline void make_table(std::uint32_t (&counts)[256], uint4 (&keys)[256 / 4],
                                  unsigned int& found, std::uint8_t (&table)[kTable],
                                  std::uint32_t (&digits)[256]) {
  const std::uint32_t t = threadIdx.x, key = counts[t] << 8 | (255 - t);
  const bool counted = key >> 8;
  auto* const flat = reinterpret_cast<std::uint32_t*>(keys);
  if (t < kTable) table[t] = 0;
  if (counted) flat[atomicAdd(&found, 1u)] = key;
  counts[t] = 0;
  digits[t] = digits_of(kTable);
  __syncthreads();
  if (counted) {
    int rank = 0;
    for (unsigned int i = 0; 4 * i < found && rank < kTable; ++i) {
      const uint4 four = keys[i];
      rank += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
    }
    digits[t] = digits_of(rank);
    if (rank < kTable) table[rank] = static_cast<std::uint8_t>(t);
  }
  __syncthreads();
  flat[t] = 0;
  if (t == 0) found = 0;
}

struct EncodeTask {
  const std::byte* values;
  std::uint64_t count, blocks, directory;  // values, blocks, bytes
  int sampled;                             // one exponent of so many is counted
  bool aligned;                            // values and payload, for the widest accesses
  Control* control;
  unsigned long long* known;  // units of each block
};

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 4)
    encode_blocks(__grid_constant__ const EncodeTask task, __grid_constant__ const Seal seal,
                  __grid_constant__ const Sources sources, Workspace* workspace) {
  __shared__ std::uint32_t counts[256], digits[256], tail[kTailWords + 2];
  __shared__ uint4 keys[256 / 4];
  __shared__ std::uint8_t table[kTable];
  __shared__ QuadTable gather;
  __shared__ OfWarps sums[kPlanes];
  __shared__ unsigned int found, taken;
  __shared__ std::uint64_t place;
  const int t = static_cast<int>(threadIdx.x);
  const InFront in_front;
  load(kGather, gather);
  for (int i = t; i < kTailWords + 2; i += kThreads) tail[i] = 0;
  if (t < 256 / 4) keys[t] = {};
  begin();
  Totals totals = inspect(sources, nullptr);  // for their flags: sums of them are encoded here
  std::byte* const body = seal.payload + sizeof(PayloadHeader);
  counts[t] = 0;
  if (t == 0) found = 0, taken = atomicAdd(&task.control->next, 1u);
  __syncthreads();
  const auto encode = [&]<bool kWhole>(std::bool_constant<kWhole>, std::uint64_t block) {
    const std::uint64_t first = block * kBlock;
    const int n = kWhole ? kBlock : static_cast<int>(min(task.count - first, kBlock));
    const int mine = kWhole ? kPerThread : min(max(n - kPerThread * t, 0), kPerThread);  // values
    const bool last = block == task.blocks - 1;
    constexpr int kSize = sizeof(T);
    const auto put = [&](std::uint64_t offset, std::uint32_t word) {
      write_word<kWhole>(body + offset, word);
      totals.written += checksum_at(offset, word);
    };
    std::uint32_t words[kWords<T>];
    read_words(task.values + (first + kPerThread * t) * kSize, mine * kSize, kWhole, words);
    const std::uint64_t ahead = first + gridDim.x * kBlock + kPerThread * t;  // somebody's next
    if (t % (kLineBytes / (kPerThread * kSize)) == 0 && ahead < task.count)
      prefetch(task.values + ahead * kSize);

    std::uint32_t special = 0;  // the sign's bit, where one more would carry the exponent into it
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w) special |= (words[w] & kExponents<T>)+kLowest<T>;
    if (special & ~kExponents<T> & kExponents<T> << 1) totals.flags |= kFoundNonFinite;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      if (i < mine && (i % kSampled == 0 || task.sampled == 1))
        atomicAdd(&counts[exponent_at<T>(words, i)], 1u);
    __syncthreads();
    make_table(counts, keys, found, table, digits);

    // Digits of each plane, with none left out.
    std::uint32_t quads[4] = {};  // a byte for each plane
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      quads[i / 4] |= digits[exponent_at<T>(words, i)] << 2 * (i % 4);
    std::uint32_t planes[kPlanes];
#pragma unroll
    for (int p = 0; p < kPlanes; p += 2) {
      const int bytes = p ? 0x7362 : 0x5140;
      const std::uint32_t low = __byte_perm(quads[0], quads[1], bytes),
                          high = __byte_perm(quads[2], quads[3], bytes);
      planes[p] = __byte_perm(low, high, 0x5410);
      planes[p + 1] = __byte_perm(low, high, 0x7632);
    }
    if (mine < kPerThread)
      for (auto& plane : planes) plane &= (1u << 2 * (mine & 15)) - 1;

    std::uint32_t left_over[kPlanes];  // places of values that have more digits
    std::uint32_t own[2], upto[2];     // how many, two counts in each
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) left_over[p] = threes(planes[p]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i] = __popc(left_over[2 * i]) | __popc(left_over[2 * i + 1]) << 16;
      upto[i] = sum_of_lanes(own[i]);
    }
    if (lane_id() == kLanes - 1)
#pragma unroll
      for (int p = 0; p < kPlanes; ++p)
        sums[p].counts[t / kLanes] = static_cast<std::uint16_t>(upto[p / 2] >> 16 * (p % 2));
    __syncthreads();
    int before[kPlanes];      // of threads in front of this one
    int begins[kPlanes + 1];  // of planes 1 to 3, the escapes and the end, in the tail's words
    begins[0] = 0;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      before[p] = in_front.before(sums[p], (upto[p / 2] - own[p / 2]) >> 16 * (p % 2) & 0xFFFF);
      const int all = InFront::all(sums[p]), held = p < kPlanes - 1 ? 16 : 4;
      begins[p + 1] = begins[p] + (all + held - 1) / held;
    }

    const Places<T> places(n);
    const int coded_bytes = places.tail + 4 * begins[kPlanes];
    // A block as long as its values, filled up, is taken for them.
    const bool coded = in_units(coded_bytes) < static_cast<std::size_t>(n * kSize);
    const int bytes = coded ? coded_bytes : n * kSize;
    const std::uint64_t units = (bytes + kUnit - 1) / kUnit;
    if (t == 0) publish(task.known, block, units);

    if (coded) {
#pragma unroll
      for (int p = 1; p < kPlanes; ++p) {
        const std::uint32_t held = gather_digits(planes[p], Quads(left_over[p - 1]), gather);
        const int digit = before[p - 1], shift = 2 * (digit % 16);
        const int at = begins[p - 1] + digit / 16;
        if (held << shift) atomicOr(&tail[at], held << shift);
        if (shift && held >> (32 - shift)) atomicOr(&tail[at + 1], held >> (32 - shift));
      }
      auto* escape =
          reinterpret_cast<std::uint8_t*>(tail + begins[kPlanes - 1]) + before[kPlanes - 1];
      for (auto more = left_over[kPlanes - 1]; more; more &= more - 1) {
        const unsigned int bit = 4 * sizeof(T) * (__ffs(more) - 1);
        std::uint32_t one[kWords<T>] = {};
#pragma unroll
        for (int w = 0; w < kWords<T>; ++w)  // no index that is known late: they are registers
          one[0] |= words[w] & (bit / 32 == w ? ~0u : 0u);
        one[0] >>= bit % 32;
        *escape++ = static_cast<std::uint8_t>(exponent_at<T>(one, 0));
      }
    }
    if (t < kLanes) {
      const std::uint64_t in_front_of_it = sum_before<2>(task.known, block, units);
      if (t == 0) place = task.directory + in_front_of_it * kUnit;
    }
    unsigned int next = 0;
    if (t == 0) next = atomicAdd(&task.control->next, 1u);
    __syncthreads();

    const std::uint64_t to = place;
    if (coded) {
      Rest<T> rest;
      rest.take(words);
      rest.for_parts(places, t, [&](int offset, const auto& part, int valid) {
        if constexpr (sizeof(part) % 16 == 0) {
          write_words(body + to + offset, valid, kWhole, part);
          totals.written += checksum_at(to + offset, part);
        } else if (valid) {
          put(to + offset, part[0]);
        }
      });
      if constexpr (std::is_same_v<T, Half>) {  // two threads' signs are a word
        const std::uint32_t other = __shfl_down_sync(~0u, rest.signs, 1);
        if (t % 2 == 0 && places.signs + 2 * t < places.table)
          put(to + places.signs + 2 * t, rest.signs | other << 16);
      }
      if (t < kTable / 4) {
        std::uint32_t word = 0;
        for (int b = 0; b < 4; ++b) word |= std::uint32_t{table[4 * t + b]} << 8 * b;
        put(to + places.table + 4 * t, word);
      }
      if (mine) put(to + places.plane + 4 * t, planes[0]);
      for (int i = t; i < begins[kPlanes]; i += kThreads) {
        put(to + places.tail + 4 * i, tail[i]);
        tail[i] = 0;
      }
      if (!last && t < (units * kUnit - bytes) / 4) put(to + bytes + 4 * t, 0);
    } else {
      write_words(body + to + kPerThread * t * kSize, mine * kSize, kWhole, words);
      totals.written += checksum_at(to + kPerThread * t * kSize, words);
    }
    if (t == 0 && block > 0) put(4 * (block - 1), static_cast<std::uint32_t>(to / kUnit));
    if (last) {
      for (std::uint64_t at = 4 * block + 4 * t; at < task.directory; at += 4 * kThreads)
        put(at, 0);
      if (t == 0) task.control->body_bytes = to + bytes;
    }
    if (t == 0) taken = next;
  };
  for (std::uint64_t block = taken; block < task.blocks; block = taken) {
    if (task.aligned && task.count - block * kBlock >= kBlock)
      encode(std::true_type{}, block);
    else
      encode(std::false_type{}, block);
    __syncthreads();  // before shared memory is used for the next
  }
  finish(workspace, totals, nullptr, &seal, &task.control->body_bytes);
}

}  // namespace cccl::lossless
