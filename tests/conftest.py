"""Settings that all Python tests share."""

from __future__ import annotations

import os

import hypothesis
import pytest

import cccl
from cccl import _core

hypothesis.settings.register_profile(
    "cccl",
    max_examples=12,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("cccl"),
                                     max_examples=200)  # fmt: skip
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "cccl"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Tells fixtures that a test failed: processes that it shared may be out of step."""
    report = (yield).get_result()
    if report.when == "call" and report.failed:
        item.failed = True


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch):
    """Every test begins with the fastest instruction set, empty statistics and no settings."""
    for variable in list(os.environ):
        if variable.startswith("CCCL_"):
            monkeypatch.delenv(variable)
    _core.force_isa("auto")
    cccl.reset_stats()
    yield
    _core.force_isa("auto")
