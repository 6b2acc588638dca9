// Between memory of any dtype and the float or double tiles that CPU codecs work on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api/buffer.h"

namespace cccl {

// Floating dtypes only; source and destination may have any alignment.
void load(DType dtype, const void* from, std::size_t n, float* to);
void load(DType dtype, const void* from, std::size_t n, double* to);

// Rounds to nearest even, once; what the dtype cannot hold becomes Inf.
void store(DType dtype, const float* from, std::size_t n, void* to);
void store(DType dtype, const double* from, std::size_t n, void* to);

// total[i] += term[i]
void add(const float* term, std::size_t n, float* total);
void add(const double* term, std::size_t n, double* total);

// values[i] /= divisor; then a finite value beyond what `dtype` holds becomes Inf, so that an
// overflow surfaces even through a codec that saturates.
void finish_sum(DType dtype, double divisor, float* values, std::size_t n);
void finish_sum(DType dtype, double divisor, double* values, std::size_t n);

// Finite values beyond what `dtype` holds become its largest: decoding must not invent an Inf.
void saturate(DType dtype, float* values, std::size_t n);

// The bits of the largest |value|, which order as the values do; NaN and Inf come last.
std::uint32_t largest_magnitude(const float* values, std::size_t n);

bool has_non_finite(const float* values, std::size_t n);
bool has_non_finite(const double* values, std::size_t n);

double value_at(ConstValues values, std::size_t i);

}  // namespace cccl
