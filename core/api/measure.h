// How far a payload is from its values, on the CPU.
#pragma once

#include "api/codec.h"

namespace cccl {

// Encodes and decodes the first few thousand values of args.in (a sample: as many as the cache
// holds) and adds sum((decoded - in)^2) to `error_squares` and sum(in^2) to `squares`.
void measure_error(const Codec& codec, EncodeArgs args, Queue& queue, double& error_squares,
                   double& squares);

bool has_non_finite(ConstValues values);

// Every value becomes NaN; integers stay as they are.
void fill_nan(Values out);

}  // namespace cccl
