#include "api/error.h"
#include "transports/nccl/nccl.h"

namespace cccl::nccl {
namespace {

[[noreturn]] void refuse() {
  throw UnsupportedError("this build has no CUDA code; rebuild with CCCLIB_CUDA=ON");
}

}  // namespace

std::shared_ptr<Transport> make_transport(const Options&, SideChannel) { refuse(); }
Version version() { refuse(); }

}  // namespace cccl::nccl
