// The exception tree lives in cccl/errors.py; here it meets its C++ twin, by name.
#include <nanobind/stl/string.h>

#include "api/error.h"
#include "bindings.h"

namespace cccl::python {
namespace {

const char* python_name(const std::exception& error) {
  if (dynamic_cast<const ConfigError*>(&error)) return "ConfigError";
  if (dynamic_cast<const UnsupportedError*>(&error)) return "UnsupportedError";
  if (dynamic_cast<const DeviceError*>(&error)) return "DeviceError";
  if (dynamic_cast<const CorruptPayloadError*>(&error)) return "CorruptPayloadError";
  if (dynamic_cast<const MismatchError*>(&error)) return "MismatchError";
  if (dynamic_cast<const NonFiniteError*>(&error)) return "NonFiniteError";
  if (dynamic_cast<const DeadlineError*>(&error)) return "DeadlineError";
  if (dynamic_cast<const PeerAbortedError*>(&error)) return "PeerAbortedError";
  if (dynamic_cast<const ClosedError*>(&error)) return "ClosedError";
  if (dynamic_cast<const TransportError*>(&error)) return "TransportError";
  return "Error";
}

nb::object python_class(const char* name) { return nb::module_::import_("cccl.errors").attr(name); }

}  // namespace

nb::object python_error_of(const std::exception& error) {
  return python_class(python_name(error))(std::string(error.what()));
}

void throw_core_error(nb::python_error& error) {
  const auto text = nb::cast<std::string>(nb::str(error.value()));
  const auto is = [&](const char* name) {
    return nb::isinstance(error.value(), python_class(name));
  };
  if (is("DeadlineError")) throw DeadlineError(text);
  if (is("PeerAbortedError")) throw PeerAbortedError(text);
  if (is("ClosedError")) throw ClosedError(text);
  if (is("Error")) throw TransportError(text);
  const auto type = nb::cast<std::string>(error.type().attr("__name__"));
  throw TransportError(type + ": " + text);
}

void register_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetString(python_class(python_name(error)).ptr(), error.what());
    }
  });
}

}  // namespace cccl::python
