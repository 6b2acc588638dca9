"""One exception tree, which also fits Python's own."""

from __future__ import annotations

import inspect

import pytest

import cccl

PARENTS = {
    "ConfigError": (cccl.Error, ValueError),
    "UnsupportedError": (cccl.Error, TypeError),
    "CorruptPayloadError": (cccl.Error, ValueError),
    "MismatchError": (cccl.Error,),
    "TransportError": (cccl.Error,),
    "DeadlineError": (cccl.TransportError, TimeoutError),
    "DeviceError": (cccl.Error, RuntimeError),
    "PeerAbortedError": (cccl.TransportError,),
    "ClosedError": (cccl.TransportError,),
    "NonFiniteError": (cccl.Error, ArithmeticError),
    "NotCompressedError": (cccl.Error,),
}


@pytest.mark.parametrize("name", PARENTS)
def test_every_error_has_its_place_in_the_tree(name):
    error = getattr(cccl, name)
    assert all(issubclass(error, parent) for parent in PARENTS[name])
    assert error.__doc__


def test_no_error_is_left_out_of_the_package():
    defined = {n for n, c in vars(cccl.errors).items() if inspect.isclass(c)}
    assert defined == {"Error", *PARENTS}
    assert defined <= set(cccl.__all__)


def test_the_core_raises_the_very_classes_of_the_package():
    with pytest.raises(cccl.ConfigError) as caught:
        cccl._core.make_codec("zip", {})
    assert type(caught.value) is cccl.ConfigError
