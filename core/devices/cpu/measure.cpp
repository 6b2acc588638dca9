#include "api/measure.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "devices/cpu/convert.h"

namespace cccl {

void measure_error(const Codec& codec, EncodeArgs args, Queue& queue, double& error_squares,
                   double& squares) {
  if (!is_floating(args.in.dtype)) return;
  constexpr std::size_t kSample = 4096;
  const auto in = args.in.part(0, std::min(kSample, args.in.count));
  thread_local std::vector<std::byte> payload, decoded;
  payload.resize(codec.max_encoded_bytes(in.count, in.dtype));
  decoded.resize(in.bytes());
  const Values out{decoded.data(), in.count, in.dtype};
  args.in = in;
  args.out = payload;
  const std::size_t size = codec.encode(args, queue);
  codec.decode({payload.data(), size}, out, queue);
  float exact[1024], found[1024];
  for (std::size_t first = 0; first < in.count; first += 1024) {
    const std::size_t n = std::min<std::size_t>(1024, in.count - first);
    load(in.dtype, in.part(first, n).data, n, exact);
    load(in.dtype, out.part(first, n).data, n, found);
    for (std::size_t i = 0; i < n; ++i) {
      const double error = double{found[i]} - exact[i];
      if (!std::isfinite(error)) continue;
      error_squares += error * error;
      squares += double{exact[i]} * exact[i];
    }
  }
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

void fill_nan(Values out) {
  if (!is_floating(out.dtype)) return;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (std::size_t i = 0; i < out.count; ++i) store(out.dtype, &nan, 1, out.part(i, 1).data);
}

}  // namespace cccl
