"""What a frontend keeps of a group's ranks beside the core's communicator: what they have agreed on
and how they failed. Knows no framework."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from ._config import Config
from ._policy import Policy, Probe
from .errors import ClosedError, UnsupportedError

_MOST_KEPT, _MOST_RECENT = 1024, 64
_LAST_SECONDS = 10.0  # at exit, for what is still under way on a GPU


NOT_BEGUN = "This call did not begin: its tensors are as they were."


def not_begun(failure: Exception) -> Exception:
    """Of an earlier call, to raise from one that finds it."""
    return type(failure)(f"{failure}. {NOT_BEGUN}")


class Members:
    """Of one group on one device. `core` is the core's communicator of all of them."""

    core: Any
    way_back = "close this communicator on all ranks, and make a new one"  # after a failure

    def __init__(self, *, on_gpu: bool):
        self.policies: dict[Hashable, Policy] = {}  # of compression_type "auto"
        self.hierarchies: dict[Hashable, Any] = {}  # by their setting
        self._on_gpu = on_gpu
        self._agreed: set[Hashable] = set()  # their kinds, which all ranks have compared
        self._failure: Exception | None = None  # of a hierarchical collective
        self._reported = False  # the failure, to a later caller

    @property
    def cores(self) -> list[Any]:
        """All communicators, in the order in which collectives pass them."""
        inner = [core for hierarchy in self.hierarchies.values() for core in hierarchy.cores]
        return [*dict.fromkeys(filter(None, inner)), self.core]

    def give_up(self, error: Exception) -> None:
        """After a failure between some of the ranks: ends what all communicators do."""
        if self._failure is None:
            self._failure = error
            for core in self.cores:
                core.abort(str(error))

    def check_open(self) -> None:
        """Raises `ClosedError` after a failure; on a GPU, where a failure is seen after the call
        returned, first the error itself."""
        closed = self.core.closed
        if not closed:
            return
        failure: Any = self._failure or self.core.failure
        if failure is not None and self._on_gpu and not self._reported:
            self._reported = True
            raise not_begun(failure) from failure
        raise ClosedError(
            f"an earlier collective of this group failed: {closed}. {NOT_BEGUN} Ranks may have "
            f"failed at different calls: {self.way_back}"
        )

    def agree(self, fields: dict[str, str]) -> None:
        """Compares what this rank is about to do with all ranks; `MismatchError`."""
        self.core.agree(fields).wait()

    def has_agreed(self, kind: Hashable) -> bool:
        """Whether `agree_once` has compared that kind."""
        return kind in self._agreed

    def agree_once(self, kind: Hashable, fields: Callable[[], dict[str, str]]) -> None:
        """Compares a call at the first use of its kind. Ranks make the same calls, so they forget
        kinds, where there are too many, at the same one."""
        if kind in self._agreed:
            return
        self.agree(fields())
        if len(self._agreed) == _MOST_KEPT:
            self.forget_kinds()
        self._agreed.add(kind)

    def forget_kinds(self) -> None:
        """All that `agree_once` has compared, which ranks compare again."""
        self._agreed.clear()

    def policy(
        self, collective: str, dtype: Any, config: Config, probe: Callable[[], Probe],
        capturing: Callable[[], bool],
    ) -> Policy:  # fmt: skip
        """Of calls of a kind under compression_type "auto"; all ranks measure at its first use.
        `capturing`: whether a CUDA graph is being captured."""
        key = collective, dtype, config.candidate_specs
        policy = self.policies.get(key)
        if policy is not None and not policy.due:
            return policy
        if capturing():
            raise UnsupportedError(
                "compression_type 'auto' measures at a collective's first use, which a CUDA graph "
                "cannot hold: run it once before the capture, or name a codec"
            )
        if policy is None:
            self.agree({
                "collective": collective,
                "dtype": str(dtype).rpartition(".")[2],  # torch's have a prefix
                "plan": "auto",
                "codecs": config.candidate_specs,
            })  # fmt: skip
            policy = self.policies[key] = Policy(tuple(config.candidates), probe())
        else:
            policy.review(probe())
        return policy

    def close_at_exit(self) -> None:
        """Before the interpreter goes: the communicators' threads call into Python."""
        for core in self.cores:
            if self._on_gpu:  # where the last collective's end is seen a little later
                until = time.monotonic() + _LAST_SECONDS
                while core.busy and time.monotonic() < until:
                    time.sleep(0.001)
            if core.busy:
                core.abort("its process is exiting")
            core.close()


M = TypeVar("M", bound=Members)


class Registry(Generic[M]):
    """Members by their frontend's group, which it does not keep alive, and by device."""

    def __init__(self) -> None:
        self.by_group: weakref.WeakKeyDictionary[Any, dict[Any, M]] = weakref.WeakKeyDictionary()
        self._recent: dict[Hashable, tuple[Any, ...]] = {}  # as `remember` was told
        self._left_behind: weakref.WeakSet[Any] = weakref.WeakSet()  # from before a fork
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget_in_fork)
        atexit.register(self._close_all)

    def find(self, group: Any, device: Any) -> M | None:
        """The open members of a group that has some on that device."""
        found = self.by_group.get(group, {}).get(device)
        return None if found is None or found.core.closed else found

    def remember(self, given: Any, device: Any, found: M, group: Any) -> None:
        """That `given`, which a caller named, means `group`, which has `found` on a device."""
        references = weakref.ref(given), weakref.ref(found), weakref.ref(group)
        with self._lock:
            if self.by_group.get(group, {}).get(device) is not found:  # made anew meanwhile
                return
            if len(self._recent) >= _MOST_RECENT:
                self._recent.clear()
            self._recent[id(given), device.index] = device, *references

    def recall(self, given: Any, device: Any) -> tuple[M, Any] | None:
        """As it was remembered, if the members are still open. Every compressed call comes here,
        and finds most of Python's code cold: that is why it takes no longer way."""
        known = self._recent.get((id(given), device.index))
        if known is None or known[0] != device or known[1]() is not given:
            return None
        found = known[2]()
        return None if found is None or found.core.closed else (found, known[3]())

    def get(self, group: Any, device: Any, make: Callable[[], M]) -> M:
        """Those of a group on a device, made at the first call. After a failure it raises."""
        if group in self._left_behind:
            raise ClosedError(
                "this process group was made before a fork, and its connections are the parent's: "
                "use collectives in the parent, or call init_process_group in the child"
            )
        with self._lock:
            devices = self.by_group.setdefault(group, {})
            found = devices.get(device)
            if found is None:
                found = devices[device] = make()
        found.check_open()
        return found

    def renew(self, group: Any, device: Any, make: Callable[[Any, M | None], M]) -> None:
        """Makes all of a group anew, from a device and what there was; where there was none, one on
        `device`. It returns once all ranks have."""
        with self._lock:
            old: dict[Any, M | None] = {**self.by_group.get(group, {})} or {device: None}
            fresh = self.by_group[group] = {place: make(place, old[place]) for place in old}
            self._recent.clear()
        del old  # outside the lock: its thread may be waiting for it
        for place in sorted(fresh, key=str):
            fresh[place].agree({"collective": "recover"})

    def _forget_in_fork(self) -> None:
        """A fork has none of the threads that communicators need: they are never touched."""
        self._lock = threading.Lock()
        for group, devices in list(self.by_group.items()):
            self._left_behind.add(group)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(devices))
        self.by_group.clear()
        self._recent.clear()

    def _close_all(self) -> None:
        for found in [one for devices in self.by_group.values() for one in devices.values()]:
            found.close_at_exit()
        self.by_group.clear()
        self._recent.clear()
