// Kernels of diff on CUDA devices, around those of the inner codec: the same arithmetic, in the
// same order, as kernels.inl. A warp has a cell, or a tile of sums, in rows of one value for each
// lane.
#pragma once

#include <limits>
#include <type_traits>

#include "codecs/diff/diff.h"
#include "devices/cuda/kernels.cuh"
#include "devices/cuda/words.cuh"

namespace cccl::diff {

using namespace cuda;

// Values whose elements are aligned.
struct Array {
  const std::byte* data;
  DType dtype;
};

struct Known {
  Array values;
  std::uint64_t count, number;

  // Whether there is a prediction of all n values from `position` on.
  __device__ bool covers(std::uint64_t position, std::uint64_t n) const {
    return number != 0 && position <= count && n <= count - position;
  }
};

template <class T, bool kNanBits, int kRows, class Real>
__device__ inline void load_rows_as(const std::byte* array, std::uint64_t first, int n,
                                    Real (&values)[kRows]) {
  const std::byte* const from = array + first * sizeof(T);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Chunk<sizeof(T)> chunk{};
    if (r * kLanes + lane_id() < n) chunk = read_chunk<sizeof(T)>(from + r * kLanes * sizeof(T));
    load<T, kNanBits, Real, 1>(chunk, values + r);
  }
}

// Rows of the n elements from `first` on, zeros behind them.
template <bool kNanBits, int kRows>
__device__ inline void load_rows(const Array& array, std::uint64_t first, int n,
                                 float (&values)[kRows]) {
  switch (array.dtype) {
    case DType::kFloat16: return load_rows_as<Half, kNanBits>(array.data, first, n, values);
    case DType::kBFloat16: return load_rows_as<BFloat, kNanBits>(array.data, first, n, values);
    default: return load_rows_as<float, kNanBits>(array.data, first, n, values);
  }
}
template <bool kNanBits, int kRows>
__device__ inline void load_rows(const Array& array, std::uint64_t first, int n,
                                 double (&values)[kRows]) {
  load_rows_as<double, kNanBits>(array.data, first, n, values);
}

// Their bits, rounded to T.
template <class T, int kRows, class Real>
__device__ inline void store_rows_as(std::byte* array, std::uint64_t first, int n,
                                     const Real (&values)[kRows]) {
  using Element = std::conditional_t<sizeof(T) == 2, std::uint16_t, Real>;
  auto* const to = reinterpret_cast<Element*>(array) + first;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int i = r * kLanes + lane_id();
    if (i >= n) continue;
    if constexpr (sizeof(T) == 2)
      to[i] = static_cast<Element>(store_exactly<T, false>(values[r]));
    else
      to[i] = values[r];
  }
}

template <class Real>
__device__ inline Real factor_of(int code) {
  return static_cast<Real>(code) / kUnit;
}

__device__ inline float largest_of_warp(float mine) {
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(mine)));
}
__device__ inline double largest_of_warp(double mine) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const double other = __shfl_xor_sync(~0u, mine, step);
    mine = other > mine ? other : mine;
  }
  return mine;
}

// Rows that are on their way from memory together.
inline constexpr int kRowsAtOnce = 8, kAtOnce = kRowsAtOnce * kLanes;
inline constexpr int kRowsOfBlock = kBlock / kLanes;

// Of several tensors' parts, alike but for this.
struct SubtractPart {
  const std::byte* values;
  std::uint64_t position;
  std::byte* rest;  // what the inner codec is given: as floats or doubles
  std::int8_t* factors;
};
struct SubtractTask {
  DType dtype;
  std::uint64_t count;
  Known known;
  Parts<SubtractPart> parts;

  __device__ Array values() const { return {parts.mine().values, dtype}; }
};

// The factor of least squares. Lanes make a sum each: the first half of squares of predictions, the
// second of their products with values. A row has two terms for each.
template <class Real>
__device__ inline int best_factor(const SubtractTask& task, std::uint64_t first, int n) {
  static_assert(kLanes == 2 * kSums);
  const bool of_products = lane_id() >= static_cast<int>(kSums);
  Real sum = 0;
#pragma unroll 1
  for (int at = 0; at < n; at += kAtOnce) {
    Real values[kRowsAtOnce], known[kRowsAtOnce];
    load_rows<false>(task.values(), first + at, n - at, values);
    load_rows<false>(task.known.values, task.parts.mine().position + first + at, n - at, known);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const Real product = values[r] * known[r], square = known[r] * known[r];
      const Real other = __shfl_xor_sync(~0u, of_products ? square : product, kSums);
      sum += of_products ? other : square;
      sum += of_products ? product : other;
    }
  }
  Real total = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(kSums); ++i)
    total += __shfl_sync(~0u, sum, (lane_id() & kSums) + i);
  const Real squares = __shfl_sync(~0u, total, 0), products = __shfl_sync(~0u, total, kSums);
  const Real wanted = kUnit * (products / squares);
  if (!(squares > 0 && fabs(wanted) <= std::numeric_limits<Real>::max())) return 0;
  const Real most = kMostFactor;
  return static_cast<int>(rint(wanted < -most ? -most : wanted > most ? most : wanted));
}

// Writes what that factor leaves; whether it is smaller.
template <class Real>
__device__ inline bool subtract(const SubtractTask& task, std::uint64_t first, int n, Real factor) {
  const SubtractPart& part = task.parts.mine();
  Real with = 0, without = 0;
#pragma unroll 1
  for (int at = 0; at < n; at += kAtOnce) {
    Real values[kRowsAtOnce], rest[kRowsAtOnce];
    load_rows<false>(task.values(), first + at, n - at, values);
    load_rows<false>(task.known.values, part.position + first + at, n - at, rest);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) rest[r] = values[r] - factor * rest[r];
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; row += kRowsOfBlock) {
      Real before = 0, after = 0;
#pragma unroll
      for (int r = row; r < row + kRowsOfBlock; ++r) {
        before = fabs(values[r]) > before ? fabs(values[r]) : before;
        after = fabs(rest[r]) > after ? fabs(rest[r]) : after;
      }
      before = largest_of_warp(before);
      after = largest_of_warp(after);
      without += before * before;
      with += after * after;
    }
    store_rows_as<Real>(part.rest, first + at, n - at, rest);
  }
  return with < without;
}

template <class Real>
__global__ void __launch_bounds__(kThreads, kResident<Real>)
    subtract_kernel(__grid_constant__ const SubtractTask task) {
  begin();
  const SubtractPart& part = task.parts.mine();
  const std::uint64_t stride = std::uint64_t{gridDim.x} * kWarps;
  std::uint64_t cell = std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes;
  for (; cell * kCell < task.count; cell += stride) {
    const std::uint64_t first = cell * kCell, left = task.count - first;
    const int n = static_cast<int>(left < kCell ? left : kCell);
    int code = 0;
    if (task.known.covers(part.position + first, n)) code = best_factor<Real>(task, first, n);
    if (code && !subtract(task, first, n, factor_of<Real>(code))) code = 0;
    if (code == 0) {
#pragma unroll 1
      for (int at = 0; at < n; at += kAtOnce) {
        Real values[kRowsAtOnce];
        load_rows<true>(task.values(), first + at, n - at, values);
        store_rows_as<Real>(part.rest, first + at, n - at, values);
      }
    }
    if (lane_id() == 0) part.factors[cell] = static_cast<std::int8_t>(code);
  }
}

inline constexpr int kPieceBytes = 16;  // that a thread copies or checks at a time

// use(offset, how many of its bytes exist) for each piece of `bytes` that this thread has.
template <class Use>
__device__ inline void for_pieces(std::uint64_t bytes, Use use) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * kThreads * kPieceBytes;
  std::uint64_t offset = (std::uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kPieceBytes;
  for (; offset < bytes; offset += stride)
    use(offset, clamp_bytes(static_cast<std::int64_t>(bytes - offset), kPieceBytes));
}

__device__ inline bool is_aligned(const std::byte* body) {
  return reinterpret_cast<std::uintptr_t>(body) % kPieceBytes == 0;
}

struct AssemblePart {
  Front front;
  const std::int8_t* factors;  // none: all are 0
  const std::byte* inner;      // the inner codec's payload, aligned
  Seal seal;
};
struct AssembleTask {
  std::uint64_t cells;
  std::uint64_t begin, bytes;  // where the inner codec's body begins, and where it ends
  Parts<AssemblePart> parts;
};

// Puts payloads together.
static __global__ void __launch_bounds__(kThreads)
    assemble_kernel(__grid_constant__ const AssembleTask task,
                    __grid_constant__ const Sources sources, Workspace* workspace) {
  const auto& [front, factors, inner, seal] = task.parts.mine();
  begin();
  Totals totals = inspect(sources, nullptr);  // for their flags: sums of them are encoded here
  std::byte* const body = seal.payload + sizeof(PayloadHeader);
  const bool aligned = is_aligned(body);
  for_pieces(task.bytes, [&](std::uint64_t offset, int valid) {
    std::uint32_t words[kPieceBytes / 4] = {};
    if (offset == 0) {
      words[0] = static_cast<std::uint32_t>(front.position);
      words[1] = static_cast<std::uint32_t>(front.position >> 32);
      words[2] = static_cast<std::uint32_t>(front.number);
      words[3] = static_cast<std::uint32_t>(front.number >> 32);
    } else if (offset >= task.begin) {
      const std::byte* const from = inner + sizeof(PayloadHeader) + (offset - task.begin);
      read_words(from, valid, valid == kPieceBytes, words);
    } else if (factors) {
      const std::uint64_t cell = offset - kFront;
      const auto left = static_cast<std::int64_t>(task.cells - cell);
      read_words(reinterpret_cast<const std::byte*>(factors) + cell, clamp_bytes(left, kPieceBytes),
                 false, words);
    }
    write_words(body + offset, valid, aligned && valid == kPieceBytes, words);
    totals.written += checksum_at(offset, words);
  });
  if (task.bytes > 0 && blockIdx.x == 0 && threadIdx.x == 0 &&
      (std::to_integer<int>(inner[offsetof(PayloadHeader, flags)]) & kHasNonFinite))
    totals.flags |= kFoundNonFinite;
  finish(workspace, totals, nullptr, &seal);
}

struct AddTask {
  const std::byte* terms;  // what the inner codec makes of each payload: floats or doubles
  std::uint64_t stride;    // bytes from one to the next
  Known known;
  std::byte* outs[kMostParts];
  DType dtype;  // of them, whose elements are aligned
  std::uint64_t count;
  bool sums;  // of all payloads into the first; else each is decoded into its own
  Mean mean;

  __device__ std::byte* out() const { return outs[blockIdx.y]; }
};

__device__ inline Front read_front(const std::byte* body) {
  std::uint32_t words[kFront / 4];
  read_words(body, kFront, is_aligned(body), words);
  return {std::uint64_t{words[1]} << 32 | words[0], std::uint64_t{words[3]} << 32 | words[2]};
}

// Values that the sum of finite terms cannot hold become the largest; Inf and NaN stay.
template <class Real>
__device__ inline Real add_back(Real difference, Real factor, Real known) {
  constexpr Real kMost = std::numeric_limits<Real>::max();
  const Real sum = difference + factor * known;
  const Real held = sum > kMost ? kMost : sum < -kMost ? -kMost : sum;
  return fabs(difference) <= kMost ? held : difference;
}

__device__ inline void store_out(const AddTask& task, std::uint64_t first, int n,
                                 double (&values)[kPerLane]) {
  store_rows_as<double>(task.out(), first, n, values);
}
__device__ inline void store_out(const AddTask& task, std::uint64_t first, int n,
                                 float (&values)[kPerLane]) {
  switch (task.dtype) {
    case DType::kFloat16:
      if (!task.sums) {
#pragma unroll
        for (float& value : values)  // decoding must not invent an Inf
          if (isfinite(value)) value = fminf(fmaxf(value, -65504.0f), 65504.0f);
      }
      return store_rows_as<Half>(task.out(), first, n, values);
    case DType::kBFloat16: return store_rows_as<BFloat>(task.out(), first, n, values);
    default: return store_rows_as<float>(task.out(), first, n, values);
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads, kResidentSums<Real>)
    add_kernel(__grid_constant__ const AddTask task, __grid_constant__ const Sources sources,
               Workspace* workspace, Report* report) {
  begin();
  const int first_source = task.sums ? 0 : static_cast<int>(blockIdx.y);
  const int end = task.sums ? sources.count : first_source + 1;
  Totals totals =
      inspect(sources.payloads + first_source, end - first_source, sources.expected, report);
  if (report)
    for (int j = first_source; j < end; ++j) {
      const std::byte* const body = sources.payloads[j] + sizeof(PayloadHeader);
      const bool aligned = is_aligned(body);
      for_pieces(sources.expected.body_bytes, [&](std::uint64_t offset, int valid) {
        std::uint32_t words[kPieceBytes / 4];
        read_words(body + offset, valid, aligned && valid == kPieceBytes, words);
        totals.read += checksum_at(offset, words);
      });
    }
  const std::uint64_t stride = std::uint64_t{gridDim.x} * kWarps * kTileValues;
  std::uint64_t first =
      (std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes) * std::uint64_t{kTileValues};
  for (; first < task.count; first += stride) {
    const int n = clamp_bytes(static_cast<std::int64_t>(task.count - first), kTileValues);
    const std::uint64_t cell = first / kCell, left = task.count - cell * kCell;
    const std::uint64_t of_cell = left < kCell ? left : kCell;
    Real sums[kPerLane], known[kPerLane];
    std::uint64_t loaded = ~std::uint64_t{0};  // the position of what is in `known`
#pragma unroll 1
    for (int j = first_source; j < end; ++j) {
      const std::byte* const body = sources.payloads[j] + sizeof(PayloadHeader);
      const int code = std::to_integer<std::uint8_t>(body[kFront + cell]);
      const auto factor = factor_of<Real>(static_cast<std::int8_t>(code));
      bool predicted = false;
      if (code) {
        const Front front = read_front(body);
        predicted = front.number == task.known.number &&
                    task.known.covers(front.position + cell * kCell, of_cell);
        if (!predicted && report && lane_id() == 0) {
          auto& found = report[blockIdx.y];
          found.prediction = {front.number, front.position, task.known.number, task.known.count};
          found.predicts_otherwise = 1;
        }
        const std::uint64_t position = front.position + first;
        if (predicted && position != loaded) {
          load_rows<false>(task.known.values, position, n, known);
          loaded = position;
        }
      }
      Real term[kPerLane];
      const auto dtype = std::is_same_v<Real, double> ? DType::kFloat64 : DType::kFloat32;
      load_rows<true>(Array{task.terms + j * task.stride, dtype}, first, n, term);
#pragma unroll
      for (int r = 0; r < kPerLane; ++r) {
        if (predicted) term[r] = add_back(term[r], factor, known[r]);
        // Others, who see no damage, must not take it for a value.
        if (code && !predicted) term[r] = nan_of<Real>();
        sums[r] = j == first_source ? term[r] : sums[r] + term[r];
      }
    }
    if (task.sums) {
      divide(task.mean, sums);
      if (task.mean.half_overflows) overflow_half(sums);
      unite_nans(sums);
    }
    store_out(task, first, n, sums);
  }
  finish(workspace, totals, report, nullptr);
}

}  // namespace cccl::diff
