"""Whatever an answer does, the notebook goes on: tried through `check` in a real kernel."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from minigrpo.exercises import judge
from minigrpo.exercises.reader import find

START = """\
import os, signal, sys, threading, time

import torch
from minigrpo.exercises import answer, check, progress

for name in ("judge", "review"):
    sys.modules[f"minigrpo.exercises.{name}"].SECONDS = 0.5
kept = 42"""

RIGHT = """\
def helper(log_probs, mask):
    return log_probs.masked_fill(mask == 0, 0.0)


def f(log_probs, mask):
    return helper(log_probs, mask).sum(dim=-1)"""

HOSTILE = {
    "an endless loop": ("while True: pass", "still running"),
    "a loop that catches every error": (
        "while True:\n"
        "        try:\n            time.sleep(0.001)\n"
        "        except BaseException: pass",
        "still running",
    ),
    "SystemExit": ("raise SystemExit(3)", "SystemExit: 3"),
    "sys.exit": ("sys.exit()", "SystemExit"),
    "exit": ("exit()", "SystemExit"),
    "quit": ("quit()", "SystemExit"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "an interrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", "KeyboardInterrupt"),
    "recursion": ("return f(log_probs, mask)", "RecursionError"),
    "ten megabytes": ("print('x' * 10**7)\n    for _ in range(10**4): print('y' * 1000)", "xxxx"),
    "ten megabytes past the notebook": (
        "sys.__stdout__.write('x' * 10**7); sys.stderr.write('z' * 10**7)",
        "zzzz",
    ),
    "a closed output": ("sys.stdout.close(); sys.stderr.close()", "returned None"),
    "an output that is gone": ("sys.stdout = sys.stderr = None", "returned None"),
    "another print": ("import builtins; builtins.print = None", "returned None"),
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
    for body, _ in HOSTILE.values():
        cells.append(f'def f(log_probs, mask):\n    {body}\n\nf = check("2.3", f)')
        cells.append("print('still here', kept, exit, quit, print, sys.stdout)")
    cells += [RIGHT, 'f = check("2.3", f)', *cells[1:3], 'answer("2.3")', "progress()"]
    printed = executed(cells, tmp_path)
    assert printed[-2] == f"{RIGHT}\n" and "passed 1 of" in printed[-1]
    usual = printed[2]
    assert usual.startswith("still here 42")
    for number, (name, (_, told)) in enumerate(HOSTILE.items()):
        assert told in printed[2 * number + 1], name
        assert len(printed[2 * number + 1]) < 2000, name
        assert printed[2 * number + 2] == usual, name


def endless(log_probs, mask):
    while True:
        try:
            time.sleep(0.001)
        except Exception:
            pass


def test_without_alarms_a_loop_that_never_ends_is_stopped_too(monkeypatch):
    monkeypatch.delattr(signal, "setitimer", raising=False)
    monkeypatch.setattr(sys.modules["minigrpo.exercises.judge"], "SECONDS", 0.3)
    threads, began = threading.active_count(), time.monotonic()
    status, message = judge("2.3", endless)
    assert status == "not passed" and "still running after 0 seconds" in message
    assert time.monotonic() - began < 10
    assert judge("2.3", find("2.3").reference)[0] == "passed"
    assert threading.active_count() <= threads  # others may have ended


def test_in_another_thread_it_is_stopped_too(monkeypatch):
    monkeypatch.setattr(sys.modules["minigrpo.exercises.judge"], "SECONDS", 0.3)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(judge("2.3", endless)[1]), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert said and "still running after 0 seconds" in said[0]
