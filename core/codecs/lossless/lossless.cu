// lossless on CUDA devices: a thread block has a block of values.
#include <memory>
#include <utility>
#include <vector>

#include "codecs/lossless/lossless.cuh"
#include "devices/cuda/copy.cuh"

namespace cccl {
namespace {

using namespace cuda;
using namespace lossless;

// Memory of one encode, zero at first.
struct Control {
  std::uint64_t body_bytes;
  unsigned int next;  // block to be taken
};

// How far the bodies of blocks are known, in units: a value, and what it is.
enum Known : std::uint64_t { kNothing = 0, kOwn = 1, kSumSoFar = 2 };

// Sums over a thread block of four counts, each at most kBlock.
struct Counts {
  std::uint32_t low, high;  // two in each, of 16 bits

  __device__ void add(const Counts& other) { low += other.low, high += other.high; }
  __device__ int at(int i) const { return (i < 2 ? low : high) >> 16 * (i % 2) & 0xFFFF; }
};

// What threads in front of this one have, and all have. `sums` is used once between two barriers.
__device__ inline void scan(const Counts& mine, Counts (&sums)[kWarps], Counts& before,
                            Counts& all) {
  Counts upto = mine;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const Counts other{__shfl_up_sync(~0u, upto.low, step), __shfl_up_sync(~0u, upto.high, step)};
    if (lane_id() >= step) upto.add(other);
  }
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  if (lane_id() == kLanes - 1) sums[warp] = upto;
  __syncthreads();
  before = {upto.low - mine.low, upto.high - mine.high};
  all = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before.add(sums[w]);
    all.add(sums[w]);
  }
}

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

__device__ inline void prefetch(const std::byte* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
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
    const bool coded = places.tail + 4 * begins[kPlanes] < raw_bytes;
    const int bytes = coded ? places.tail + 4 * begins[kPlanes] : raw_bytes;
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
  if (block < task.blocks - 1) found.end = std::uint64_t{in.word(4 * block, ignored)} * kUnit;
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

template <class Use>
void with_element(DType dtype, Use use) {
  switch (dtype) {
    case DType::kFloat32: return use(float{});
    case DType::kFloat16: return use(Half{});
    default: return use(BFloat{});
  }
}

class LosslessOnCuda final : public CudaCodec {
 public:
  explicit LosslessOnCuda(std::shared_ptr<const Codec> codec)
      : CudaCodec(std::move(codec)),
        identity_(codec_on(DeviceKind::kCuda, make_codec("identity"))),
        sampled_(spec().ends_with("level=best)") ? 1 : kSampled) {}

  std::size_t encode(const EncodeArgs& args, Queue& queue) const override {
    const auto& on = cuda_queue(queue);
    DeviceGuard guard(on.device().index);
    return encode_elements(args.in, args, Sources{}, on);
  }

  void decode(Bytes payload, Values out, Queue& queue) const override {
    const auto& on = cuda_queue(queue);
    DeviceGuard guard(on.device().index);
    decode_elements(payload, out, on);
  }

  void reduce(const ReduceArgs& args, Values out, Queue& queue) const override {
    const Plain plain(*this, args, out.count, out.dtype, queue);
    identity_->reduce({plain.payloads, args.divisor}, out, queue);
  }

  std::size_t reduce_encode(const ReduceArgs& args, const Codec& second, EncodeArgs target,
                            Queue& queue) const override {
    const Plain plain(*this, args, target.in.count, target.in.dtype, queue);
    return identity_->reduce_encode({plain.payloads, args.divisor}, second, target, queue);
  }

  std::size_t encode_sums(ConstValues values, const EncodeArgs& args, const Sources& sources,
                          const CudaQueue& on) const override {
    DeviceGuard guard(on.device().index);
    const auto [_, count, dtype] = args.in;
    const Scratch scratch(identity_->max_encoded_bytes(count, dtype), on);
    auto rounded = args;
    rounded.checksum = false;
    rounded.out = {static_cast<std::byte*>(scratch.data()),
                   identity_->max_encoded_bytes(count, dtype)};
    dynamic_cast<const CudaCodec&>(*identity_).encode_sums(values, rounded, Sources{}, on);
    return encode_elements({rounded.out.data() + sizeof(PayloadHeader), count, dtype}, args,
                           sources, on);
  }

 private:
  // Payloads as those of identity: their sums are its own.
  struct Plain {
    Plain(const LosslessOnCuda& codec, const ReduceArgs& args, std::size_t count, DType dtype,
          Queue& queue)
        : each(in_units(codec.identity_->max_encoded_bytes(count, dtype))),
          memory((args.payloads.size() + 1) * each, cuda_queue(queue)) {
      auto* at = static_cast<std::byte*>(memory.data());
      EncodeArgs copy;
      copy.in = {at, count, dtype};
      copy.checksum = false;
      for (const Bytes payload : args.payloads) {
        codec.decode(payload, {at, count, dtype}, queue);
        copy.out = {static_cast<std::byte*>(memory.data()) + each * (payloads.size() + 1), each};
        codec.identity_->encode(copy, queue);
        payloads.push_back(copy.out);
      }
    }
    std::size_t each;
    Scratch memory;
    std::vector<Bytes> payloads;
  };

  // Returns the most bytes that the payload may have: its header will say.
  std::size_t encode_elements(ConstValues values, const EncodeArgs& args, const Sources& sources,
                              const CudaQueue& on) const {
    const auto seal = seal_of(args);
    const std::size_t most = sizeof(PayloadHeader) + seal.header.body_bytes;
    if (!codes(values.dtype)) {
      copy_in(values, seal, sources, on);
      return most;
    }
    check_size(values.dtype, values.count);
    const std::uint64_t blocks = blocks_of(values.count);
    const std::size_t bytes = sizeof(Control) + blocks * sizeof(std::uint64_t);
    const Scratch scratch(bytes, on);
    CCCLIB_CUDA(cudaMemsetAsync, scratch.data(), 0, bytes, on.stream());
    auto* const control = static_cast<Control*>(scratch.data());
    const EncodeTask task{static_cast<const std::byte*>(values.data),
                          values.count,
                          blocks,
                          directory_bytes(values.count),
                          sampled_,
                          all_aligned(values.data, args.out.data()),
                          control,
                          reinterpret_cast<unsigned long long*>(control + 1)};
    with_element(values.dtype, [&]<class T>(T) {
      launch(encode_blocks<T>, on, blocks * kWarps, task, seal, sources, on.workspace());
    });
    return most;
  }

  void decode_elements(Bytes payload, Values out, const CudaQueue& on) const {
    const auto sources = sources_of({&payload, 1}, out.count, out.dtype);
    if (!codes(out.dtype)) return copy_out(out, sources, on);
    const std::uint64_t blocks = blocks_of(out.count);
    const DecodeTask task{static_cast<std::byte*>(out.data), out.count, blocks,
                          directory_bytes(out.count), all_aligned(payload.data(), out.data)};
    with_element(out.dtype, [&]<class T>(T) {
      launch(decode_blocks<T>, on, blocks * kWarps, task, sources, on.workspace(), on.report());
    });
  }

  std::shared_ptr<const Codec> identity_;
  int sampled_;
};

}  // namespace

std::shared_ptr<const Codec> lossless_on_cuda(std::shared_ptr<const Codec> codec) {
  return std::make_shared<LosslessOnCuda>(std::move(codec));
}

}  // namespace cccl
