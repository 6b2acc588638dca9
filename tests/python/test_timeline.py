"""Arithmetic of spans, by hand."""

from __future__ import annotations

import pytest

from cccl import _timeline
from cccl._timeline import Event, common, merged


def test_spans_are_merged_and_met():
    assert merged([(3, 4), (0, 1), (1, 2), (0.5, 1.5)]) == [(0, 2), (3, 4)]
    assert common([(0, 2), (3, 6)], [(1, 4), (5, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert common([(0, 1)], []) == [] and common([(0, 1)], [(1, 2)]) == []


def test_parts_of_a_step_by_hand():
    events = [
        Event("compute", "a", (0, 4)),
        Event("compute", "b", (3, 5)),  # beside the first
        Event("communication", "c", (4, 8)),
        Event("codec", "d", (3, 4)),  # beside computation
        Event("codec", "d", (7, 9)),  # half beside communication
        Event("compute", "a", (20, 30)),  # in no step
    ]
    found = _timeline.parts(events, [(0, 10)])
    assert found == {
        "step": 10, "compute": 5, "communication": 4, "communication_hidden": 1,
        "communication_exposed": 3, "codec": 3, "codec_hidden": 2, "codec_exposed": 1, "other": 1,
    }  # fmt: skip


def test_parts_are_means_over_steps():
    found = _timeline.parts([Event("compute", "a", (0, 3))], [(0, 4), (10, 12)])
    assert found["step"] == 3 and found["compute"] == 1.5 and found["other"] == 1.5


def test_a_picture_has_a_row_for_each_stream(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot", reason="draws")
    rows = []
    close = plt.close
    plt.close = lambda figure: rows.extend(  # looks at the figure before it is gone
        [label.get_text() for axis in figure.axes for label in axis.get_yticklabels()]
    )
    try:
        events = [Event("communication", "stream 7", (1, 2)), Event("compute", "stream 0", (0, 2))]
        _timeline.draw(tmp_path / "x.png", {"plain": (events, (0, 2)), "ours": (events, (0, 2))})
    finally:
        plt.close = close
    assert rows == ["stream 0", "stream 7"] * 2
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
