"""What all commands of `python -m cccl` have in common: help with an example, and progress."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from cccl.__main__ import main

COMMANDS = [
    ["bench", "codec"], ["bench", "collective"], ["bench", "table"], ["converge", "run"],
    ["converge", "report"], ["doctor"], ["plan"], ["profile"], ["rules"], ["tune"], ["watch"],
]  # fmt: skip
PROGRESS = (
    "from cccl import _show\n"
    "with _show.progress(2, 'work') as advance:\n"
    "    advance('one'); advance('two')\n"
    "_show.table(['name', 'ms'], [['a', '1']])\n"
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_json(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "example:" in shown and f"-m cccl {' '.join(command)}" in shown and "--json" in shown


def test_no_command_is_missing_here(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    listed = shown[shown.index("{") + 1 : shown.index("}")].split(",")
    assert sorted(listed) == sorted({command[0] for command in COMMANDS})


def test_progress_and_tables_are_plain_lines_in_a_pipe():
    done = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True,
                          timeout=60)  # fmt: skip
    assert done.stderr == "work 1/2: one\nwork 2/2: two\n"
    assert done.stdout == "name  ms\na     1\n"


def test_progress_is_a_bar_on_a_terminal_and_a_table_has_lines():
    pytest.importorskip("rich", reason="the bar is rich's")
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen([sys.executable, "-c", PROGRESS], stdout=child, stderr=child,
                          stdin=child, env=environment):  # fmt: skip
        os.close(child)
        shown = b""
        try:
            while part := os.read(parent, 4096):
                shown += part
        except OSError:  # the terminal's other end is closed
            pass
    os.close(parent)
    text = shown.decode()
    assert "2/2" in text and "━" in text and "\x1b[" in text  # drawn in place
    assert "work 1/2: one" not in text and "┃" in text
