#include "devices/cpu/convert.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "devices/cpu/half.h"
#include "devices/cpu/isa.h"

namespace cccl {
namespace {

inline float narrow(double value) { return static_cast<float>(value); }
inline double widen(float value) { return value; }

struct ConvertKernels {
  void (*load_half)(const void*, std::size_t, float*);
  void (*load_bfloat)(const void*, std::size_t, float*);
  void (*load_double)(const void*, std::size_t, float*);
  void (*store_half)(const float*, std::size_t, void*);
  void (*store_bfloat)(const float*, std::size_t, void*);
  void (*store_double)(const float*, std::size_t, void*);
  void (*add)(const float*, std::size_t, float*);
  void (*divide)(float, float*, std::size_t);
  void (*multiply)(float, float*, std::size_t);
  std::uint32_t (*largest_magnitude)(const float*, std::size_t);
};

#define CCCLIB_KERNELS "devices/cpu/convert_kernels.inl"
#include "devices/cpu/foreach_isa.inl"

const ConvertKernels& kernels() {
  static const ConvertKernels all[] = {baseline::kKernels, avx2::kKernels, avx512::kKernels};
  return pick(all);
}

[[noreturn]] void refuse(DType dtype) {
  throw UnsupportedError(std::string("dtype ") + name_of(dtype) + " is no floating-point type");
}

constexpr float kHalfMax = 65504.0f;
constexpr float kHalfOverflow = 65520.0f;  // the least magnitude that rounds to Inf

template <class Real>
void surface_half_overflow(Real* values, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i)
    if (std::abs(values[i]) >= kHalfOverflow)
      values[i] = std::copysign(std::numeric_limits<Real>::infinity(), values[i]);
}

}  // namespace

void load(DType dtype, const void* from, std::size_t n, float* to) {
  switch (dtype) {
    case DType::kFloat32: std::memcpy(to, from, n * sizeof(float)); return;
    case DType::kFloat16: return kernels().load_half(from, n, to);
    case DType::kBFloat16: return kernels().load_bfloat(from, n, to);
    case DType::kFloat64: return kernels().load_double(from, n, to);
    default: refuse(dtype);
  }
}

void load(DType dtype, const void* from, std::size_t n, double* to) {
  if (dtype != DType::kFloat64) refuse(dtype);
  std::memcpy(to, from, n * sizeof(double));
}

void store(DType dtype, const float* from, std::size_t n, void* to) {
  switch (dtype) {
    case DType::kFloat32: std::memcpy(to, from, n * sizeof(float)); return;
    case DType::kFloat16: return kernels().store_half(from, n, to);
    case DType::kBFloat16: return kernels().store_bfloat(from, n, to);
    case DType::kFloat64: return kernels().store_double(from, n, to);
    default: refuse(dtype);
  }
}

void store(DType dtype, const double* from, std::size_t n, void* to) {
  if (dtype != DType::kFloat64) refuse(dtype);
  std::memcpy(to, from, n * sizeof(double));
}

void add(const float* term, std::size_t n, float* total) { kernels().add(term, n, total); }

void add(const double* term, std::size_t n, double* total) {
  for (std::size_t i = 0; i < n; ++i) total[i] += term[i];
}

void finish_sum(DType dtype, double divisor, float* values, std::size_t n) {
  if (divisor != 1) {
    int exponent;  // dividing by a power of two is multiplying by its inverse, to the last bit
    const auto by = static_cast<float>(divisor);
    if (std::frexp(by, &exponent) == 0.5f)
      kernels().multiply(1 / by, values, n);
    else
      kernels().divide(by, values, n);
  }
  if (dtype == DType::kFloat16) surface_half_overflow(values, n);
}

void finish_sum(DType, double divisor, double* values, std::size_t n) {
  if (divisor != 1)
    for (std::size_t i = 0; i < n; ++i) values[i] /= divisor;
}

void saturate(DType dtype, float* values, std::size_t n) {
  if (dtype != DType::kFloat16) return;
  for (std::size_t i = 0; i < n; ++i) {
    const float v = values[i], magnitude = std::abs(v);  // Inf and NaN pass
    if (magnitude > kHalfMax && magnitude <= std::numeric_limits<float>::max())
      values[i] = std::copysign(kHalfMax, v);
  }
}

std::uint32_t largest_magnitude(const float* values, std::size_t n) {
  return kernels().largest_magnitude(values, n);
}

bool has_non_finite(const float* values, std::size_t n) {
  return largest_magnitude(values, n) >= 0x7F800000u;
}

bool has_non_finite(const double* values, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i)
    if (!std::isfinite(values[i])) return true;
  return false;
}

double value_at(ConstValues values, std::size_t i) {
  const auto one = values.part(i, 1);
  double wide;
  float single;
  if (values.dtype == DType::kFloat64) return load(one.dtype, one.data, 1, &wide), wide;
  return load(one.dtype, one.data, 1, &single), single;
}

}  // namespace cccl
