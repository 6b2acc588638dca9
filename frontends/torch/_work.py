"""A collective under way, with the methods of c10d's Work."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from .._calls import Ended
from ..errors import DeadlineError


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether the current stream of its device is being captured into a CUDA graph."""
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def profiler_ranges() -> Callable[[str, bool], None]:
    """Shows the core's ranges to torch.profiler: called where one begins and where it ends."""
    open_ranges: list[torch.profiler.record_function] = []

    def observe(name: str, begins: bool) -> None:
        if begins:
            open_ranges.append(torch.profiler.record_function(name))
            open_ranges[-1].__enter__()
        else:
            open_ranges.pop().__exit__(None, None, None)

    return observe


class Work:
    """Returned by collectives called with `async_op=True`.

    The tensors may be read or changed only after `wait()` returned True, or the future is done. On
    a GPU that holds for what is submitted to the current stream behind `wait()`.
    """

    def __init__(
        self, result: torch.Tensor, *, host_waits: bool = True, has_future: bool = True
    ) -> None:
        """`has_future`: false where the current stream will see the result without it."""
        self._result, self._host_waits = result, host_waits
        self._kept: Any = None  # tensors that the core reads and writes by address
        if has_future:
            devices = [result.device] if result.is_cuda else None
            self._future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._on_stream = result.is_cuda and has_future
        self._core: Any = None
        self._failure: Exception | None = None  # of what follows the core's work

    @classmethod
    def finished(cls, result: torch.Tensor) -> Work:
        """Of a collective that had nothing to do."""
        work = cls(result)
        work._core = Ended()
        work._future.set_result(result)
        return work

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Blocks until the result is there; raises what the collective raised.

        `timeout` is in seconds; `DeadlineError` if it passes first (the collective goes on). On a
        GPU the current stream waits, and the host only if `timeout` is given or `non_finite` is
        "raise"; an error that is not known yet is raised by the next call.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if self._host_waits or seconds is not None:
            if not self._core.wait(seconds):
                raise DeadlineError(f"the collective was not done after {seconds:g} s")
        elif (known := self._core.error()) is not None:
            raise known
        if self._on_stream:
            self._future.wait()  # for the current stream
        if self._failure is not None:
            raise self._failure
        return True

    def is_completed(self) -> bool:
        """Whether it ended, well or not."""
        return bool(self._core.done())

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What it raised, if it ended badly."""
        error: Exception | None = self._core.error()
        return error or self._failure

    def result(self) -> list[torch.Tensor]:
        """The output, once done."""
        return [self._result]

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """Completes with the output tensor, or the error of `wait()`."""
        return self._future
