// The exception tree; bindings/cccl/errors.py has the same one in Python.
#pragma once

#include <stdexcept>
#include <string>

namespace cccl {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An option that does not exist, or a value it cannot take.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// A dtype, device or layout that this call cannot handle.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

// What cannot be captured into a CUDA graph, or not yet.
class CaptureError : public UnsupportedError {
 public:
  using UnsupportedError::UnsupportedError;
};

// A call of the device's runtime failed; the message names the call, the device and the reason.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// Bytes that are not a whole, intact payload of the expected kind.
class CorruptPayloadError : public Error {
 public:
  using Error::Error;
};

// Ranks called a collective with different arguments or configurations.
class MismatchError : public Error {
 public:
  using Error::Error;
};

// The bytes could not be moved: a lost peer, a closed connection.
class TransportError : public Error {
 public:
  using Error::Error;
};

// A wait went past its deadline.
class DeadlineError : public TransportError {
 public:
  using TransportError::TransportError;
};

// Another rank gave up this collective; the message carries that rank's reason.
class PeerAbortedError : public TransportError {
 public:
  using TransportError::TransportError;
};

// The communicator failed earlier or was closed and takes no more work.
class ClosedError : public TransportError {
 public:
  using TransportError::TransportError;
};

// A gradient held an Inf or NaN and the configuration asks to be told.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

}  // namespace cccl
