// Looks at values in host memory.
#pragma once

#include "api/buffer.h"
#include "api/device.h"

namespace cccl {

inline constexpr std::size_t kErrorSample = 4096;  // values: as many as a cache holds

// Adds up what is finite in both.
ErrorSums compare(ConstValues exact, ConstValues found);

bool has_non_finite(ConstValues values);

}  // namespace cccl
