"""Whatever an answer does, the notebook goes on: tried through `check` in a real kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

START = """\
import os, signal, sys, threading, time

import torch
from minigrpo.exercises import answer, check, progress

sys.modules["minigrpo.exercises.judge"].SECONDS = 0.5
kept = 42"""

RIGHT = """\
def helper(log_probs, mask):
    return log_probs.masked_fill(mask == 0, 0.0)


def f(log_probs, mask):
    return helper(log_probs, mask).sum(dim=-1)"""

ACCIDENTS = {
    "an endless loop": ("while True: pass", "all cases together took more than"),
    "a loop that catches its errors": (
        "while True:\n        try:\n            time.sleep(0.001)\n        except Exception: pass",
        "all cases together took more than",
    ),
    "SystemExit": ("raise SystemExit(3)", "SystemExit: 3"),
    "sys.exit": ("sys.exit()", "SystemExit"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "it was interrupted"),
    "an interrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", "it was interrupted"),
    "recursion": ("return f(log_probs, mask)", "RecursionError"),
    "ten megabytes": ("print('x' * 10**7)\n    for _ in range(10**4): print('y' * 1000)", "xxxx"),
    "a question": ("input('?')", "raised StdinNotImplementedError"),
    "too much memory": ("torch.zeros(10**15)", "RuntimeError"),
}


def executed(cells: list[str], folder: Path) -> list[str]:
    """What each of these cells prints, in one kernel; the first that raises ends the test."""
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(nb, timeout=120, resources={"metadata": {"path": str(folder)}})
    client.execute(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return ["".join(_said(one) for one in cell.outputs) for cell in nb.cells]


def _said(output: nbformat.NotebookNode) -> str:
    return output.get("text") or output.get("data", {}).get("text/plain", "")


@pytest.mark.kernel
@pytest.mark.skipif(sys.platform == "win32", reason="no alarms and no SIGINT on this platform")
def test_a_notebook_survives_what_an_answer_does(tmp_path):
    """And what passed before is remembered afterwards, with the whole cell."""
    cells = [START]
    for body, _ in ACCIDENTS.values():
        cells.append(f'def f(log_probs, mask):\n    {body}\n\nf = check("2.3", f)')
        cells.append("print('still here', kept, print, sys.stdout)")
    cells += [RIGHT, 'f = check("2.3", f)', *cells[1:3], 'answer("2.3")', "progress()"]
    printed = executed(cells, tmp_path)
    assert printed[-2] == f"{RIGHT}\n" and "passed 1 of" in printed[-1]
    usual = printed[2]
    assert usual.startswith("still here 42")
    for number, (name, (_, told)) in enumerate(ACCIDENTS.items()):
        assert told in printed[2 * number + 1], name
        assert len(printed[2 * number + 1]) < 2000, name
        assert printed[2 * number + 2] == usual, name
