#include "bindings.h"

NB_MODULE(_core, module) {
  module.doc() = "The core of CCCL. Use the package `cccl`; this module takes raw addresses.";
  nanobind::set_leak_warnings(false);  // what the interpreter still holds at exit is no leak
  module.attr("version") = CCCLIB_VERSION;
  cccl::python::register_errors(module);
  cccl::python::register_cuda(module);
  cccl::python::register_codec(module);
  cccl::python::register_communicator(module);
}
