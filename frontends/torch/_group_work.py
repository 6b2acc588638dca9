"""What a collective of backend "cccl" returns: a work of c10d's, for Python and for C++."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ._compile import untraced
from ._work import Work


@untraced
class GroupWork(dist.Work):  # type: ignore[misc]
    """One or more works under way, compressed ones and the plain group's, as one.

    c10d's own works made from futures would lose the errors' types, and wait without a timeout.
    """

    def __init__(self, works: Sequence[Any], tensors: list[torch.Tensor]):
        super().__init__()
        self._works, self._tensors = works, tensors
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until all are done; raises what one of them raised. C++ gives 0 for no timeout."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completes with the tensors, or the error of `wait()`.

        In a backward, where DDP would turn an error into a `RuntimeError`, it completes with the
        tensors in any case, and the error comes out of `loss.backward()` by itself.
        """
        if self._future is None:
            raises = torch._C._current_graph_task_id() == -1
            if not raises:  # queued from a callback, so that it runs behind DDP's own
                queue = Variable._execution_engine.queue_callback
                queue(lambda: queue(self.wait))
            futures = [work.get_future() for work in self._works]
            self._future = _joined(futures, self._tensors, raises)
        return self._future


def finished(tensors: list[torch.Tensor]) -> GroupWork:
    """Of collectives that were waited for."""
    return GroupWork([Work.finished(tensors[0])], tensors)


def _joined(
    futures: list[torch.futures.Future[Any]], tensors: list[torch.Tensor], raises: bool
) -> torch.futures.Future[list[torch.Tensor]]:
    def result(done: Any) -> list[torch.Tensor]:
        for future in futures if raises else ():
            future.value()  # raises, and what raises in `then` is an error for C++ too
        return tensors

    first = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
    return first.then(result)
