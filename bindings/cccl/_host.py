"""What frontends need that move bytes in host memory themselves."""

from __future__ import annotations

import ctypes
import sys


class Haste:
    """While transfers are under way, a thread that wants the GIL gets it after 0.05 ms instead of
    Python's 5 ms: each message needs it, and training code may be busy in Python."""

    _SECONDS = 5e-5

    def __init__(self) -> None:
        self._active: set[int] = set()
        self._usual = 0.0

    def begin(self, transport: object) -> None:
        """Until `end`. Threads that meet here at worst leave each other the usual interval."""
        if not self._active and sys.getswitchinterval() > self._SECONDS:
            self._usual = sys.getswitchinterval()
            sys.setswitchinterval(self._SECONDS)
        self._active.add(id(transport))

    def end(self, transport: object) -> None:
        """No transfer is under way there."""
        self._active.discard(id(transport))
        if not self._active and self._usual:
            sys.setswitchinterval(self._usual)
            self._usual = 0.0


haste = Haste()


def memory_at(address: int, nbytes: int) -> memoryview:
    """The core's memory, to be written too."""
    view: memoryview = _memory(address, nbytes, _WRITABLE)
    return view


# No ctypes array: each length would be a type of its own, and types stay.
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE
