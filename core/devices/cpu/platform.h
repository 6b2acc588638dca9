#pragma once

#include <memory>

#include "api/device.h"

namespace cccl {

std::shared_ptr<const Platform> cpu_platform();

}  // namespace cccl
