"""The notebooks with the exercises solved: strictly, offline, and what was written is what runs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from course import lacks
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from minigrpo.exercises.reader import find, solution_source

OFFLINE = Path(__file__).parents[1] / "offline"
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
EXECUTABLE = [
    pytest.param(path, marks=pytest.mark.skipif(bool(lacks(path)), reason=f"no {lacks(path)}"))
    for path in PATHS
]
CHECK = re.compile(r"^\w+ = check\(\"(?P<key>[\dA.]+)\", (?P<name>\w+)(?:, line)?\)$", re.MULTILINE)


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kernels") / "connections"


@pytest.fixture(autouse=True)
def connections(log, monkeypatch) -> Path:
    """Where kernels write down whom they tried to reach."""
    log.unlink(missing_ok=True)
    monkeypatch.setenv("MINIGRPO_TEST_CONNECTIONS", str(log))
    return log


def exercise_cells(nb: NotebookNode) -> dict[str, tuple[int, int]]:
    """For each exercise, where its stub and its check stand."""
    found = {}
    for at, cell in enumerate(nb.cells):
        for match in CHECK.finditer(cell.source) if cell.cell_type == "code" else ():
            head = f"def {match['name']}("
            above = [c.source if c.cell_type == "code" else "" for c in nb.cells[:at]]
            stubs = [i for i, source in enumerate(above) if head in source]
            found[match["key"]] = (stubs[-1], at)
    return found


def with_line(key: str, source: str) -> str:
    """In a review, with the number of the wrong line too."""
    exercise = find(key)
    return f"{source}\nline = {exercise.line}" if exercise.bugs else source


WRONG = """\
import minigrpo.exercises.reader as _reader

_said, _wrong = _reader.find({key!r}).slips[0]
try:
    _reader.check({key!r}, _wrong{line})
except AssertionError as error:
    assert _said in str(error)
    print({key!r}, "refuses a wrong answer")
"""


REFUSING = """\
import builtins
from minigrpo.exercises.judge import Checked as _Checked

_call, _refused = _Checked.__call__, set()

def _refuse_once(self, *args, **kwargs):
    if builtins.running and self.key not in _refused:
        _refused.add(self.key)
        raise RuntimeError("refused: " + self.key)
    return _call(self, *args, **kwargs)

_Checked.__call__ = _refuse_once
"""


YOURS = "01 02 03 04 05 06 07 09 10 11 12 ap".split()  # where what the reader writes is what runs


def solve(nb: NotebookNode) -> dict[str, int]:
    """Put every solution in the place of its stub, and a wrong answer before its check.

    Nothing has to be quick. Returns where the check of each exercise is.
    """
    cells = exercise_cells(nb)
    for cell in nb.cells:
        cell.source = re.sub(r"\bseconds < \d+", "seconds > 0", cell.source)
    for key, (stub, at) in cells.items():
        line = f", {find(key).line}" if find(key).bugs else ""
        nb.cells[stub].source = with_line(key, solution_source(key))
        nb.cells[at].source = WRONG.format(key=key, line=line) + nb.cells[at].source
    first = next(cell for cell in nb.cells if cell.cell_type == "code")
    first.source = REFUSING + first.source
    return {key: at for key, (_, at) in cells.items()}


def stopped(nb: NotebookNode) -> Iterator[tuple[str, int]]:
    """Each exercise whose function stops a cell with the tag `run` by refusing, and where that is.

    Every function that `check` gave back refuses its first call in a run, which then starts anew.
    """
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    client = NotebookClient(nb, timeout=600, kernel_name="python3", resources=resources)
    with client.setup_kernel():
        for at, cell in enumerate(nb.cells):
            if cell.cell_type == "code":
                running = "run" in cell.metadata.get("tags", [])
                cell.source = f"import builtins; builtins.running = {running}\n{cell.source}"
            while True:
                try:
                    client.execute_cell(cell, at)
                    break
                except CellExecutionError as error:
                    told, _, key = error.evalue.partition(": ")
                    if told != "refused":
                        raise
                    yield key, at


@pytest.mark.kernel
@pytest.mark.parametrize("path", EXECUTABLE, ids=lambda p: p.stem)
def test_a_notebook_passes_with_all_solutions_and_they_are_what_runs(
    path, connections, monkeypatch
):
    """Strictly and offline; and below each check is a run that needs what the reader wrote."""
    monkeypatch.setenv("MINIGRPO_STRICT", "1")
    paths = [str(OFFLINE), os.environ.get("PYTHONPATH", str(NOTEBOOKS.parent))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    nb = nbformat.read(path, as_version=4)
    checks = solve(nb)
    needed = dict(stopped(nb))
    printed = "".join(
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in nb.cells
        for output in cell.get("outputs", [])
    )
    for key in checks:
        assert f"{key} refuses a wrong answer\n{key} ({find(key).title}): passed" in printed
    if path.stem[:2] in YOURS:
        assert needed.keys() == checks.keys()
    assert all(at > checks[key] for key, at in needed.items())
    # Notebook 01 asks for the corpus, where there is none on this machine.
    assert path.stem.startswith("01") or not connections.exists(), connections.read_text()


@pytest.mark.parametrize("call", ["socket.create_connection(there, 1)", "s.connect_ex(there)"])
def test_a_connection_elsewhere_is_refused_and_written_down(connections, call):
    code = f"import socket; s = socket.socket(); there = ('192.0.2.1', 80); {call}"
    environment = {**os.environ, "PYTHONPATH": str(OFFLINE)}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    assert "OSError: a test forbids the network" in done.stderr
    assert connections.read_text() == "192.0.2.1\n"
