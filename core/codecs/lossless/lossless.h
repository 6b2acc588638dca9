// The numbers of the lossless format that every device shares. FORMAT.md is the specification.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "api/dtype.h"
#include "api/error.h"

namespace cccl::lossless {

inline constexpr std::size_t kBlock = 4096;  // values that are coded together
inline constexpr std::size_t kUnit = 16;     // bytes; blocks begin at multiples of it
inline constexpr int kPlanes = 4;            // of digits
inline constexpr int kTable = 3 * kPlanes;   // exponents that have digits
inline constexpr int kSampled = 8;           // level fast counts one exponent of so many

constexpr std::size_t padded(std::size_t bytes) { return (bytes + 3) / 4 * 4; }
constexpr std::size_t in_units(std::size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

// Whether exponents of that type are coded. All others are kept as they are.
constexpr bool codes(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat32;
}

constexpr std::size_t blocks_of(std::size_t n) { return n / kBlock + (n % kBlock != 0); }

// A row of 4 bytes for each block but the first, in front of all blocks.
constexpr std::size_t directory_bytes(std::size_t n) {
  return n > kBlock ? in_units(4 * (blocks_of(n) - 1)) : 0;
}

// Throws UnsupportedError for more values than a directory reaches: its rows are 32-bit units.
inline void check_size(DType dtype, std::size_t n) {
  if (in_units(n * size_of(dtype) + directory_bytes(n)) / kUnit > 0xFFFFFFFFu)
    throw UnsupportedError("codec 'lossless' encodes at most 64 GiB at once, got " +
                           std::to_string(n) + " values: encode parts");
}

// Digits of two bits, in words.
constexpr std::size_t plane_bytes(std::size_t digits) { return (digits + 15) / 16 * 4; }

// What a coded block begins with: all bits of n values but the exponents.
constexpr std::size_t rest_bytes(DType dtype, std::size_t n) {
  switch (dtype) {
    case DType::kFloat32: return padded(2 * n) + padded(n);
    case DType::kFloat16: return padded(n) + plane_bytes(n) + (n + 31) / 32 * 4;
    default: return padded(n);
  }
}

// An exponent with all bits set is that of Inf and NaN.
constexpr std::uint8_t top_exponent(DType dtype) { return dtype == DType::kFloat16 ? 31 : 255; }

}  // namespace cccl::lossless
