// What the parts of the module share.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "api/buffer.h"
#include "api/residual.h"

namespace cccl {
class Communicator;
}

namespace cccl::python {

namespace nb = nanobind;

void register_errors(nb::module_& module);
void register_codec(nb::module_& module);
void register_residual(nb::module_& module);
void register_state(nb::module_& module);
void register_communicator(nb::module_& module);
void register_plain(nb::module_& module);
void register_cuda(nb::module_& module);

// Of a Communicator of Python.
const Communicator& communicator_of(nb::handle object);

// Throws ConfigError.
ResidualType residual_type_named(const std::string& name);

// Throws the C++ twin of a Python exception that a callback raised. Needs the GIL.
[[noreturn]] void throw_core_error(nb::python_error& error);

// The Python twin of a C++ exception, as an object. Needs the GIL.
nb::object python_error_of(const std::exception& error);

inline ConstValues values_at(std::uintptr_t address, std::size_t count, std::uint8_t dtype) {
  return {reinterpret_cast<const void*>(address), count, DType{dtype}};
}

inline Values mutable_values_at(std::uintptr_t address, std::size_t count, std::uint8_t dtype) {
  return {reinterpret_cast<void*>(address), count, DType{dtype}};
}

}  // namespace cccl::python
