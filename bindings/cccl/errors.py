"""The exceptions of CCCL. Each says what is wrong, where, and what to do."""


class Error(Exception):
    """Base of all errors that CCCL raises."""


class ConfigError(Error, ValueError):
    """An option that does not exist, or a value it cannot take."""


class UnsupportedError(Error, TypeError):
    """A dtype, device or layout that this call cannot handle; raised before anything is sent."""


class DeviceError(Error, RuntimeError):
    """A call of a device's runtime failed; the message names call, device and reason."""


class CorruptPayloadError(Error, ValueError):
    """Bytes that are not a whole, intact payload of the expected kind."""


class MismatchError(Error):
    """Ranks called a collective with different arguments or configurations."""


class TransportError(Error):
    """The bytes could not be moved: a peer is lost or a connection closed."""


class DeadlineError(TransportError, TimeoutError):
    """A wait went past its deadline."""


class PeerAbortedError(TransportError):
    """Another rank gave up; the message carries its reason."""


class ClosedError(TransportError):
    """The communicator failed earlier or was closed."""


class NonFiniteError(Error, ArithmeticError):
    """A gradient held an Inf or NaN, and `non_finite = "raise"` is set."""


class NotCompressedError(Error):
    """Strict mode: something that should be compressed would have gone plain."""
