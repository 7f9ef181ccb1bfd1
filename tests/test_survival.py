"""Whatever an answer does, the notebook goes on: tried through `check` in a real kernel."""

import subprocess
import sys

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

TOO_LONG = "all cases together took more than"
ACCIDENTS = {  # the body of an answer, and what its author is told
    "while True: pass": TOO_LONG,
    "while True:\n        try: time.sleep(0.001)\n        except Exception: pass": TOO_LONG,
    "raise SystemExit(3)": "SystemExit: 3",
    "raise KeyboardInterrupt": "it was interrupted",
    "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)": "it was interrupted",
    "return f(log_probs, mask)": "RecursionError",
    "print('x' * 10**7)\n    for _ in range(10**4): print('y' * 1000)": "xxxx",
    "input('?')": "raised StdinNotImplementedError",
    "torch.zeros(10**15)": "RuntimeError",
}


@pytest.mark.kernel
@pytest.mark.skipif(sys.platform == "win32", reason="no alarms and no SIGINT on this platform")
def test_a_notebook_survives_what_an_answer_does(tmp_path):
    """And what passed before is remembered afterwards, with the whole cell."""
    cells = [START]
    for body in ACCIDENTS:
        cells.append(f'def f(log_probs, mask):\n    {body}\n\nf = check("2.2", f)')
        cells.append("print('still here', kept, 'sympy' in sys.modules, print, sys.stdout)")
    cells += [RIGHT, 'f = check("2.2", f)', *cells[1:3], 'answer("2.2")', "progress()"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(nb, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    printed = [
        "".join(out.get("text") or out.data["text/plain"] for out in cell.outputs)
        for cell in nb.cells
    ]
    assert printed[-2] == f"{RIGHT}\n" and "passed 1 of" in printed[-1]
    # torch imports sympy for grad_outputs. If the alarm cuts that in half, it stays broken.
    assert (usual := printed[2]).startswith("still here 42 False")
    for number, (body, told) in enumerate(ACCIDENTS.items()):
        assert told in printed[2 * number + 1] and len(printed[2 * number + 1]) < 2000, body
        assert printed[2 * number + 2] == usual, body
