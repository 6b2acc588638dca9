// Between the bits of a row in memory and the floats or doubles that codecs work on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "api/dtype.h"
#include "devices/cpu/half.h"

namespace cccl::cuda {

// Element types by their bits; float and double stand for themselves.
struct Half {
  std::uint16_t bits;
};
struct BFloat {
  std::uint16_t bits;
};

// What values of T are summed in.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class Use>
void with_float_type(DType dtype, Use use) {
  switch (dtype) {
    case DType::kFloat32: return use(float{});
    case DType::kFloat16: return use(Half{});
    case DType::kBFloat16: return use(BFloat{});
    case DType::kFloat64: return use(double{});
    default: throw UnsupportedError(std::string(name_of(dtype)) + " is no floating-point type");
  }
}

// The bits of one lane in one row: N bytes, in 32-bit words.
template <int kBytes>
struct Chunk {
  static constexpr int kWords = (kBytes + 3) / 4;
  std::uint32_t words[kWords];
};

// A NaN that arithmetic makes is 0x7FFFFFFF on a GPU; everywhere else in CCCL it is this one.
inline constexpr std::uint32_t kNan = 0x7FC00000u;

template <class Real>
__device__ inline Real nan_of() {
  if constexpr (std::is_same_v<Real, double>) return __longlong_as_double(0x7FF8000000000000ll);
  return __uint_as_float(kNan);
}

// Between float and double as a CPU does it: a NaN keeps its sign and upper bits, and is quiet.
__device__ inline double widen(float value) {
  if (!isnan(value)) return value;
  const std::uint64_t bits = __float_as_uint(value);
  return __longlong_as_double(static_cast<long long>(
      (bits & 0x80000000u) << 32 | (bits & 0x7FFFFFu) << 29 | 0x7FF8000000000000ull));
}
__device__ inline float narrow(double value) {
  if (!isnan(value)) return __double2float_rn(value);
  const auto bits = static_cast<std::uint64_t>(__double_as_longlong(value));
  return __uint_as_float(static_cast<std::uint32_t>(bits >> 32 & 0x80000000u) |
                         static_cast<std::uint32_t>(bits >> 29 & 0x7FFFFFu) | kNan);
}

__device__ inline bool either_nan(float a, float b) { return isnan(a) | isnan(b); }

// kNanBits: a NaN keeps its sign and bits, as on a CPU. Without, a half takes one instruction.
template <class T, bool kNanBits, class Real, int kCount>
__device__ inline void load(const Chunk<kCount * sizeof(T)>& from, Real* to) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<T, double>) {
      const auto bits = std::uint64_t{from.words[2 * i + 1]} << 32 | from.words[2 * i];
      const double value = __longlong_as_double(static_cast<long long>(bits));
      if constexpr (std::is_same_v<Real, double>)
        to[i] = value;
      else
        to[i] = narrow(value);
    } else {
      const std::uint32_t word = from.words[i * sizeof(T) / 4];
      float value;
      if constexpr (std::is_same_v<T, float>)
        value = __uint_as_float(word);
      else if constexpr (std::is_same_v<T, BFloat>)
        value = __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
      else if constexpr (kNanBits)
        value = half_to_float(static_cast<std::uint16_t>(i % 2 ? word >> 16 : word));
      else
        value = __half2float(__half_raw{static_cast<unsigned short>(i % 2 ? word >> 16 : word)});
      if constexpr (std::is_same_v<Real, double>)
        to[i] = widen(value);
      else
        to[i] = value;
    }
  }
}

// The exact way, for the few values that the instructions would turn into others than a CPU does.
template <class T, bool kSaturate>
__device__ inline std::uint32_t store_exactly(float value) {
  if constexpr (std::is_same_v<T, BFloat>) return float_to_bfloat(value);
  if (kSaturate && isfinite(value)) value = fminf(fmaxf(value, -65504.0f), 65504.0f);
  return float_to_half(value);
}

// Rounds to nearest even, as a CPU's store() does. kSaturate: finite values stay finite.
template <class T, bool kSaturate, int kCount, class Real>
__device__ inline Chunk<kCount * sizeof(T)> store(const Real* from) {
  Chunk<kCount * sizeof(T)> to;
  if constexpr (std::is_same_v<T, double>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto bits = static_cast<std::uint64_t>(__double_as_longlong(from[i]));
      to.words[2 * i] = static_cast<std::uint32_t>(bits);
      to.words[2 * i + 1] = static_cast<std::uint32_t>(bits >> 32);
    }
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to.words[i] = __float_as_uint(from[i]);
  } else {
    constexpr bool kLimited = kSaturate && std::is_same_v<T, Half>;
    bool special = false;
#pragma unroll
    for (int i = 0; i < kCount; i += 2)
      special |= kLimited ? !(fabsf(from[i]) <= 65504.0f) | !(fabsf(from[i + 1]) <= 65504.0f)
                          : either_nan(from[i], from[i + 1]);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      if constexpr (std::is_same_v<T, BFloat>) {
        const __nv_bfloat162_raw pair = __floats2bfloat162_rn(from[i], from[i + 1]);
        to.words[i / 2] = pair.x | std::uint32_t{pair.y} << 16;
      } else {
        const __half2_raw pair = __floats2half2_rn(from[i], from[i + 1]);
        to.words[i / 2] = pair.x | std::uint32_t{pair.y} << 16;
      }
    }
    if (special) {
#pragma unroll
      for (int i = 0; i < kCount; i += 2)
        to.words[i / 2] =
            store_exactly<T, kSaturate>(from[i]) | store_exactly<T, kSaturate>(from[i + 1]) << 16;
    }
  }
  return to;
}

// The exponent bits of the elements in a 32-bit word: all set in an Inf or NaN.
struct Exponents {
  std::uint32_t low, high;  // of two elements, or twice of the same
  bool odd_words_only;      // those of float64
  bool floating;
};

inline Exponents exponents_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return {0x7F800000u, 0x7F800000u, false, true};
    case DType::kFloat16: return {0x7C00u, 0x7C000000u, false, true};
    case DType::kBFloat16: return {0x7F80u, 0x7F800000u, false, true};
    case DType::kFloat64: return {0x7FF00000u, 0x7FF00000u, true, true};
    default: return {};
  }
}

// Of word i of elements.
__device__ inline bool has_non_finite(std::uint32_t word, int i, const Exponents& exponents) {
  const bool special =
      (word & exponents.low) == exponents.low || (word & exponents.high) == exponents.high;
  return special && (i % 2 || !exponents.odd_words_only) && exponents.floating;
}

}  // namespace cccl::cuda
