"""The notebooks with the exercises solved: strictly, all that has to do with them, and offline."""

from __future__ import annotations

import ast
import dis
import os
import re
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import nbformat
import pytest
from course import lacks
from jupyter_client import KernelManager
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
CHECK = re.compile(r"^\w+ = check\(\"(?P<key>[\d.]+)\", (?P<name>\w+)(?:, line)?\)$", re.MULTILINE)


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kernels") / "connections"


@pytest.fixture(autouse=True)
def connections(log, monkeypatch) -> Path:
    """Where kernels write down whom they tried to reach."""
    log.unlink(missing_ok=True)
    monkeypatch.setenv("MINIGRPO_TEST_CONNECTIONS", str(log))
    return log


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """One for all notebooks: a start and the libraries take as long as the cells of most."""
    manager = KernelManager(kernel_name="python3")
    yield manager
    if manager.has_kernel:
        manager.shutdown_kernel(now=True)


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


def execute(
    nb: NotebookNode, monkeypatch, kernel: KernelManager | None = None, folder: Path = NOTEBOOKS
) -> None:
    """Run in place, strict and without a network; raises CellExecutionError.

    A kernel that is given is started where it isn't alive, and goes on living.
    """
    monkeypatch.setenv("MINIGRPO_STRICT", "1")
    paths = [str(OFFLINE), os.environ.get("PYTHONPATH", str(NOTEBOOKS.parent))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    resources = {"metadata": {"path": str(folder)}}
    options = {"timeout": 600, "kernel_name": "python3", "resources": resources}
    NotebookClient(nb, **options, km=kernel).execute()


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


LEARNS = ("07_grpo", "12_several_turns")  # their cells ask what a whole run has learned
SHORT = """\
%reset -f
from dataclasses import replace as _replace
import minigrpo.grpo as _grpo
import minigrpo.pretrain as _pretrain

def _ten_steps(run):
    run = getattr(run, "whole", run)
    def shorter(model, data, config, **options):
        few = {"steps": min(config.steps, 10)}
        few |= {"warmup": 0} if hasattr(config, "warmup") else {}
        return run(model, data, _replace(config, **few), **options)
    shorter.whole = run
    return shorter

_grpo.train_grpo = _ten_steps(_grpo.train_grpo)
_pretrain.pretrain = _ten_steps(_pretrain.pretrain)
"""


def solve(nb: NotebookNode) -> list[str]:
    """Put every solution in the place of its stub, and a wrong answer before its check.

    Nothing has to be quick, or to learn: that is asked of the notebook as it stands. So a run takes
    ten steps at most, and that on the page of 01 a hundred. Returns the keys.
    """
    cells = exercise_cells(nb)
    for cell in nb.cells:
        cell.source = re.sub(r"\bseconds < \d+", "seconds > 0", cell.source)
        cell.source = re.sub(r"\[\], 200$", "[], 40", cell.source, flags=re.MULTILINE)  # in 06
        cell.source = re.sub(r"^STEPS = 800$", "STEPS = 100", cell.source, flags=re.MULTILINE)  # 01
    for key, (stub, at) in cells.items():
        line = f", {find(key).line}" if find(key).bugs else ""
        nb.cells[stub].source = with_line(key, solution_source(key))
        nb.cells[at].source = WRONG.format(key=key, line=line) + nb.cells[at].source
    return list(cells)


def names_read(code: CodeType) -> Iterator[str]:
    """The global names that code reads, the functions inside it included."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_read(constant)


def outside(scope: symtable.SymbolTable) -> set[str]:
    """The names of the notebook that a function or another inner scope reads."""
    own = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global()}
    return own.union(*map(outside, scope.get_children()))


def trained_in(source: str) -> set[str]:
    """The names in the calls that change what they are given, such as a model."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        called = getattr(node, "func", None)
        name = getattr(called, "attr", getattr(called, "id", ""))
        if name in {"pretrain", "train_grpo", "warm_up", "step", "load_state_dict"}:
            found |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return found


def names_in(source: str) -> tuple[set[str], set[str], set[str], dict[str, set[str]]]:
    """The names that a cell uses, wants from earlier cells, binds, and what its functions read."""
    cell = symtable.symtable(source, "cell", "exec")
    symbols = cell.get_symbols()
    used = {s.get_name() for s in symbols if s.is_referenced()}.union(
        *map(outside, cell.get_children())
    )
    wanted, bound = set(), set()
    for step in dis.get_instructions(compile(source, "cell", "exec")):
        if isinstance(step.argval, CodeType):
            wanted |= set(names_read(step.argval)) - bound
        elif step.opname == "LOAD_NAME":
            wanted |= {step.argval} - bound
        elif step.opname == "STORE_NAME":
            bound.add(step.argval)
    inner = [child for child in cell.get_children() if child.get_name() in bound]
    return used | bound, wanted, bound, {child.get_name(): outside(child) for child in inner}


def without_strangers(nb: NotebookNode, solved: set[str]) -> NotebookNode:
    """The notebook without the code cells that the `solved` functions have nothing to do with.

    Left out is a cell that does not use one, directly or through a function of the notebook, and
    neither binds nor trains what a cell that stays reads later. The first one, which sets the
    notebook up, stays. `make test` executes all of them with the functions of the package.
    """
    parsed = {
        at: names_in(cell.source) for at, cell in enumerate(nb.cells) if cell.cell_type == "code"
    }
    users = {min(parsed)}
    for at, (used, _, _, functions) in parsed.items():
        solved = solved | {name for name, inside in functions.items() if inside & solved}
        if solved & used:
            users.add(at)
    stay, wanted = set(), set()
    for at, (_, reads, bound, _) in reversed(parsed.items()):
        if at in users or (bound | trained_in(nb.cells[at].source)) & wanted:
            stay.add(at)
            wanted = wanted - bound | reads
    nb.cells = [cell for at, cell in enumerate(nb.cells) if at in stay]
    return nb


@pytest.mark.kernel
@pytest.mark.parametrize("path", EXECUTABLE, ids=lambda p: p.stem)
def test_notebook_passes_with_all_solutions_pasted_in(path, kernel, connections, monkeypatch):
    nb = nbformat.read(path, as_version=4)
    checked = {match["name"] for cell in nb.cells for match in CHECK.finditer(cell.source)}
    keys = solve(nb)
    nb = without_strangers(nb, checked)
    if path.stem in LEARNS:
        execute(nb, monkeypatch)
    else:
        nb.cells[0].source = SHORT + nb.cells[0].source
        execute(nb, monkeypatch, kernel)
    printed = "".join(
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in nb.cells
        for output in cell.get("outputs", [])
    )
    for key in keys:
        assert f"{key} refuses a wrong answer\n{key} ({find(key).title}): passed" in printed
    # Notebook 01 asks for the corpus, where there is none on this machine.
    assert path.stem.startswith("01") or not connections.exists(), connections.read_text()


YOURS = "01 02 03 04 05 06 07 09 10 11 12".split()  # where what the reader writes is what runs
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


def stopped(client: NotebookClient) -> Iterator[tuple[str, int]]:
    """Each exercise whose function stops a cell with the tag `run` by refusing, and where that is.

    Every function that `check` gave back refuses its first call in a run, which then starts anew.
    """
    with client.setup_kernel():
        for at, cell in enumerate(client.nb.cells):
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
@pytest.mark.parametrize(
    "path", [p for p in EXECUTABLE if p.values[0].stem[:2] in YOURS], ids=lambda p: p.stem
)
def test_what_the_reader_writes_is_what_runs(path, monkeypatch):
    """No exercise is for its own sake: below its check is a run that needs what was written."""
    nb = nbformat.read(path, as_version=4)
    cells = exercise_cells(nb)
    for key, (stub, _) in cells.items():
        nb.cells[stub].source = with_line(key, solution_source(key))
    first = next(cell for cell in nb.cells if cell.cell_type == "code")
    first.source = REFUSING + first.source
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", str(NOTEBOOKS.parent)))
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    needed: dict[str, int] = {}
    for key, at in stopped(NotebookClient(nb, timeout=600, resources=resources)):
        needed[key] = at
        if needed.keys() == cells.keys():  # the rest of the notebook has nothing to add
            break
    assert needed.keys() == cells.keys()
    assert all(needed[key] > check for key, (_, check) in cells.items())


@pytest.mark.parametrize("call", ["socket.create_connection(there, 1)", "s.connect_ex(there)"])
def test_a_connection_elsewhere_is_refused_and_written_down(connections, call):
    code = f"import socket; s = socket.socket(); there = ('192.0.2.1', 80); {call}"
    environment = {**os.environ, "PYTHONPATH": str(OFFLINE)}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    assert "OSError: a test forbids the network" in done.stderr
    assert connections.read_text() == "192.0.2.1\n"
