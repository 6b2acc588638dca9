// Residuals in a CPU's memory, and payloads of values that they correct.
#pragma once

#include <cstddef>
#include <memory>

#include "api/residual.h"
#include "devices/cpu/cpu_codec.h"

namespace cccl {

// Bytes of a residual. All zero, they stand for zeros.
std::size_t residual_bytes(ResidualType type, std::size_t count);

// Values [first, first + n) of a residual of `count`, at most kTile; `first` as its granularity
// asks.
void load_residual(ResidualType type, const std::byte* from, std::size_t count, std::size_t first,
                   std::size_t n, float* values);
void store_residual(ResidualType type, const float* values, std::size_t count, std::size_t first,
                    std::size_t n, std::byte* to);

// Adds the residual to what it is given, has `writer` write the sum, and keeps what that lost.
// `delivered`: readers take the values rounded to `dtype`, as results are.
std::unique_ptr<PayloadWriter> correcting(std::unique_ptr<PayloadWriter> writer,
                                          const Residual& residual, DType dtype, bool delivered);

}  // namespace cccl
