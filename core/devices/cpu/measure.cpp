#include "api/measure.h"

#include <algorithm>
#include <cmath>

#include "devices/cpu/convert.h"

namespace cccl {

ErrorSums compare(ConstValues exact, ConstValues found) {
  ErrorSums sums;
  float before[1024], after[1024];
  for (std::size_t first = 0; first < exact.count; first += 1024) {
    const std::size_t n = std::min<std::size_t>(1024, exact.count - first);
    load(exact.dtype, exact.part(first, n).data, n, before);
    load(found.dtype, found.part(first, n).data, n, after);
    for (std::size_t i = 0; i < n; ++i) {
      const double error = double{after[i]} - before[i];
      if (!std::isfinite(error)) continue;
      sums.error_squares += error * error;
      sums.squares += double{before[i]} * before[i];
    }
  }
  return sums;
}

bool has_non_finite(ConstValues values) {
  if (!is_floating(values.dtype)) return false;
  for (std::size_t first = 0; first < values.count; first += 1024) {
    const auto part = values.part(first, std::min<std::size_t>(1024, values.count - first));
    double wide[1024];
    float tile[1024];
    const bool is_wide = values.dtype == DType::kFloat64;
    is_wide ? load(part.dtype, part.data, part.count, wide)
            : load(part.dtype, part.data, part.count, tile);
    if (is_wide ? has_non_finite(wide, part.count) : has_non_finite(tile, part.count)) return true;
  }
  return false;
}

}  // namespace cccl
