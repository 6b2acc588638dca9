#include <nanobind/stl/string.h>

#include <string>

#include "bindings.h"

namespace cccl::python {
namespace {

// What `python -m cccl doctor` says of this build.
nb::dict build_facts() {
  const std::string toolkit = CCCLIB_CUDA_TOOLKIT;
  nb::dict facts;
  facts["compiler"] = __VERSION__;
  facts["cuda"] = toolkit.empty() ? nb::object(nb::none()) : nb::cast(toolkit);
  facts["cuda_code"] = CCCLIB_CUDA_CODE;
  return facts;
}

}  // namespace
}  // namespace cccl::python

NB_MODULE(_core, module) {
  module.doc() = "The core of CCCL. Use the package `cccl`; this module takes raw addresses.";
  nanobind::set_leak_warnings(false);  // what the interpreter still holds at exit is no leak
  module.attr("version") = CCCLIB_VERSION;
  module.attr("build") = cccl::python::build_facts();
  cccl::python::register_errors(module);
  cccl::python::register_cuda(module);
  cccl::python::register_codec(module);
  cccl::python::register_residual(module);
  cccl::python::register_state(module);
  cccl::python::register_communicator(module);
  cccl::python::register_plain(module);
}
