"""tools/check.py: it stops at the first failure, counts, and never passes what tested nothing."""

from __future__ import annotations

from pathlib import Path

import course
import pytest

from tools import check

UNITS = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_a"/>{}
</testsuite></testsuites>"""
CELLS = """<testsuites><testsuite>
<testcase classname="notebooks.01_one" name="Cell 0"/>
<testcase classname="notebooks.01_one" name="Cell 1"/>
<testcase classname="notebooks.02_two" name="Cell 0"/>
</testsuite></testsuites>"""
SKIPPED = '<testcase classname="tests.test_a" name="test_b"><skipped message="slow"/></testcase>'
FAILED = '<testcase classname="tests.test_a" name="test_b"><failure message="no"/></testcase>'


@pytest.fixture
def notebooks(tmp_path: Path) -> Path:
    """A folder of two notebooks."""
    for name in ("01_one.ipynb", "02_two.ipynb"):
        (tmp_path / name).touch()
    return tmp_path


class Stages:
    """Stands in for the stages: notes them, writes junit files, fails the one asked for."""

    def __init__(self, units: str, cells: str, failing: int | None = None) -> None:
        self.junit, self.failing, self.seen = {"units.xml": units, "cells.xml": cells}, failing, []

    def __call__(self, arguments: list[str]) -> int:
        self.seen.append(arguments)
        for argument in arguments:
            if argument.startswith("--junitxml="):
                path = Path(argument.split("=", 1)[1])
                path.write_text(self.junit[path.name])
        return 3 if len(self.seen) - 1 == self.failing else 0


def test_last_line_counts_what_passed(notebooks, capsys):
    stages = Stages(UNITS.format(SKIPPED), CELLS)
    assert check.check(stages, notebooks) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "skipped: tests.test_a::test_b: slow"
    assert lines[-1].startswith(
        "passed: 1 unit tests, 3 notebook cells in 2 notebooks, ruff clean, 1 skipped ("
    )
    strict = stages.seen[-1]
    assert "--nbval" in strict and "--nbval-lax" not in strict


@pytest.mark.parametrize("failing", range(4))
def test_first_failing_stage_ends_the_run(notebooks, capsys, failing):
    stages = Stages(UNITS.format(""), CELLS, failing)
    assert check.check(stages, notebooks) == 3
    assert len(stages.seen) == failing + 1
    assert "passed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("units", "cells"),
    [
        (UNITS.format(""), "<testsuites/>"),
        (UNITS.format(""), CELLS.replace("02_two", "01_one")),
        ("<testsuites/>", CELLS),
        (f"<testsuites><testsuite>{SKIPPED}{FAILED}</testsuite></testsuites>", CELLS),
    ],
)
def test_what_tested_nothing_has_not_passed(notebooks, capsys, units, cells):
    assert check.check(Stages(units, cells), notebooks) == 1
    assert "FAILED" in capsys.readouterr().out


def test_no_notebooks_is_a_failure(tmp_path):
    assert check.check(Stages(UNITS.format(""), CELLS), tmp_path) == 1


def test_a_notebook_without_its_library_is_skipped_and_named(notebooks, capsys, monkeypatch):
    monkeypatch.setattr(course, "NEEDS", {"02_two": "no_such_library"})
    cells = CELLS.replace("02_two", "01_one")
    stages = Stages(UNITS.format(""), cells)
    assert check.check(stages, notebooks) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "skipped: 02_two.ipynb: no_such_library is not installed"
    assert "in 1 notebook, ruff clean, 1 skipped" in lines[-1]
    assert "--ignore=notebooks/02_two.ipynb" in stages.seen[-1]
