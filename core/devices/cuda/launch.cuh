// How kernels are launched that wait by themselves for the kernel in front of them.
#pragma once

#include <cuda_runtime.h>

#include "devices/cuda/check.h"

namespace cccl::cuda {

// Where the hardware can, the kernel comes while the one in front of it ends (see begin()).
template <class... Parameters, class... Arguments>
void launch_early(cudaLaunchConfig_t config, int device, void (*kernel)(Parameters...),
                  const Arguments&... arguments) {
  int major = 0;
  CCCLIB_CUDA(cudaDeviceGetAttribute, &major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "a kernel launch");
}

}  // namespace cccl::cuda
