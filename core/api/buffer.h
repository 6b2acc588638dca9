// Spans of memory as the interfaces pass them: an address, a length and, for values, a dtype.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "api/dtype.h"

namespace cccl {

using Bytes = std::span<const std::byte>;
using MutableBytes = std::span<std::byte>;

// `count` elements of `dtype`, contiguous, at any alignment.
struct ConstValues {
  const void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::kFloat32;

  std::size_t bytes() const { return count * size_of(dtype); }
  ConstValues part(std::size_t first, std::size_t n) const {
    return {static_cast<const std::byte*>(data) + first * size_of(dtype), n, dtype};
  }
};

struct Values {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::kFloat32;

  std::size_t bytes() const { return count * size_of(dtype); }
  Values part(std::size_t first, std::size_t n) const {
    return {static_cast<std::byte*>(data) + first * size_of(dtype), n, dtype};
  }
  operator ConstValues() const { return {data, count, dtype}; }
};

}  // namespace cccl
