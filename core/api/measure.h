// How far a payload is from its values, on the CPU.
#pragma once

#include "api/codec.h"

namespace cccl {

// Adds sum((decode(payload) - in)^2) to `error_squares` and sum(in^2) to `squares`.
void measure_error(const Codec& codec, Bytes payload, ConstValues in, Queue& queue,
                   double& error_squares, double& squares);

bool has_non_finite(ConstValues values);

// Every value becomes NaN; integers stay as they are.
void fill_nan(Values out);

}  // namespace cccl
