"""tools/check.py: it stops at the first failure, counts, and never passes what tested nothing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import check
import course
import pytest

UNIT = '<testcase classname="tests.test_a" name="test_a"/>'
CELLS = """
<testcase classname="notebooks.01_one" name="Cell 0"/>
<testcase classname="notebooks.01_one" name="Cell 1"/>
<testcase classname="notebooks.02_two" name="Cell 0"/>
"""
SKIPPED = '<testcase classname="tests.test_a" name="test_b"><skipped message="slow"/></testcase>'
FAILED = '<testcase classname="tests.test_a" name="test_b"><failure message="no"/></testcase>'


@pytest.fixture
def notebooks(tmp_path: Path) -> Path:
    """A folder of two notebooks."""
    for name in ("01_one.ipynb", "02_two.ipynb"):
        (tmp_path / name).touch()
    return tmp_path


class Stages:
    """Stands in for the stages: notes them, writes the junit file, fails the one asked for."""

    def __init__(self, *cases: str, failing: int | None = None) -> None:
        self.junit = f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"
        self.failing, self.seen = failing, []

    def __call__(self, arguments: list[str]) -> int:
        self.seen.append(arguments)
        for argument in arguments:
            if argument.startswith("--junitxml="):
                Path(argument.split("=", 1)[1]).write_text(self.junit)
        return 3 if len(self.seen) - 1 == self.failing else 0


def test_last_line_counts_what_passed(notebooks, capsys):
    stages = Stages(UNIT, SKIPPED, CELLS)
    assert check.check(stages, notebooks) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "skipped: tests.test_a::test_b: slow"
    assert lines[-1].startswith(
        "passed: 1 unit tests, 3 notebook cells in 2 notebooks, ruff clean, 1 skipped ("
    )
    assert stages.seen[:2] == [["ruff", "check", "."], ["ruff", "format", "--check", "."]]
    strict = stages.seen[-1]
    assert "--nbval" in strict and "--nbval-lax" not in strict
    assert strict[-2:] == ["notebooks", "tests"]
    assert "-n 2 --dist loadfile" in " ".join(strict)  # which conftest.py shares out by files


def test_a_stage_runs_without_options_from_outside_and_without_a_network(monkeypatch):
    seen = {}

    def ran(command, **given):
        seen.update(given, command=command)
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(check.subprocess, "run", ran)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--nbval-lax")
    monkeypatch.delenv("MINIGRPO_THREADS", raising=False)
    assert check.python(["pytest", "-q"]) == 7
    environment = seen["env"]
    assert "PYTEST_ADDOPTS" not in environment and environment["MINIGRPO_THREADS"] == "1"
    offline = str(check.ROOT / "tests" / "offline")
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == offline
    assert seen["cwd"] == check.ROOT and seen["command"][1:] == ["-m", "pytest", "-q"]


@pytest.mark.parametrize("failing", range(3))
def test_first_failing_stage_ends_the_run(notebooks, capsys, failing):
    stages = Stages(UNIT, CELLS, failing=failing)
    assert check.check(stages, notebooks) == 3
    assert len(stages.seen) == failing + 1
    assert "passed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "cases",
    [
        (UNIT,),
        (UNIT, CELLS.replace("02_two", "01_one")),
        (CELLS,),
        (SKIPPED, FAILED, CELLS),
        (FAILED.replace("failure", "error"), CELLS),
    ],
)
def test_what_tested_nothing_has_not_passed(notebooks, capsys, cases):
    assert check.check(Stages(*cases), notebooks) == 1
    assert "FAILED" in capsys.readouterr().out


def test_no_notebooks_is_a_failure(tmp_path):
    assert check.check(Stages(UNIT, CELLS), tmp_path) == 1


def test_a_notebook_without_its_library_is_skipped_and_named(notebooks, capsys, monkeypatch):
    monkeypatch.setattr(course, "NEEDS", {"02_two": "no_such_library"})
    cells = CELLS.replace("02_two", "01_one")
    stages = Stages(UNIT, cells)
    assert check.check(stages, notebooks) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "skipped: 02_two.ipynb: no_such_library is not installed"
    assert "in 1 notebook, ruff clean, 1 skipped" in lines[-1]
    assert "--ignore=notebooks/02_two.ipynb" in stages.seen[-1]


@pytest.fixture
def root_conftest():
    """The module conftest.py beside the package, which shares the tests out."""
    spec = importlib.util.spec_from_file_location("root_conftest", check.ROOT / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_goes_to_one_process_and_the_longest_go_first(root_conftest):
    file, alone = "tests/test_exercise_notebooks.py::", root_conftest.ALONE
    solved = [file + alone, *(file + alone.replace("07_grpo", name) for name in ("02_a", "03_b"))]
    cells = [f"notebooks/07_grpo.ipynb::Cell {n}" for n in range(2)]
    others = [f"tests/test_{name}.py::test_one" for name in ("arithmetic", "clinic", "gpt")]
    items = [SimpleNamespace(nodeid=nodeid) for nodeid in [*others, *solved, *cells]]
    root_conftest.pytest_collection_modifyitems(SimpleNamespace(workerinput={}), items)
    sorted_ids = [item.nodeid for item in items]
    assert sorted_ids == [others[1], *solved, *cells, others[0], others[2]]
    assert len({root_conftest.share(nodeid) for nodeid in sorted_ids}) == 6


def test_what_is_called_long_is_there(root_conftest):
    files = [*(check.ROOT / "notebooks").glob("*.ipynb"), *(check.ROOT / "tests").glob("*.py")]
    assert set(root_conftest.LONGEST) <= {path.stem for path in files}
    exercises = (check.ROOT / "tests" / "test_exercise_notebooks.py").read_text("utf-8")
    name, _, notebook = root_conftest.ALONE.partition("[")
    assert f"def {name}(" in exercises and f'LEARNS = ("{notebook[:-1]}",)' in exercises
