"""What `make test` runs: lint, unit tests, and every notebook against its stored output.

The stages run one after the other; tests and notebooks in two processes with one thread each, file
by file. The first stage that fails ends the run with its exit status; otherwise the last line says
how many passed. A notebook whose library there is not for this Python is skipped, and the last
lines say so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from course import lacks

ROOT = Path(__file__).resolve().parent.parent
# A file is not cut up: what it has prepared, it prepares once, and the cells of a notebook need the
# ones before. In their order, so that the longest come early.
PARALLEL = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
CELL_TIMEOUT = 600  # seconds; nbval also waits that long for a kernel that has died

Runner = Callable[[list[str]], int]


@dataclass
class Report:
    """The outcome of one pytest run, read from its junit file."""

    passed: int = 0
    files: set[str] = field(default_factory=set)  # dotted names of the files that passed tests
    skipped: list[str] = field(default_factory=list)  # "test: reason"

    @classmethod
    def read(cls, path: Path) -> Report:
        """Count the test cases of a junit file."""
        report = cls()
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            skipped = case.find("skipped")
            if skipped is not None:
                name = f"{case.get('classname')}::{case.get('name')}"
                report.skipped.append(f"{name}: {skipped.get('message')}")
            elif case.find("failure") is None and case.find("error") is None:
                report.passed += 1
                report.files.add(case.get("classname", ""))
        return report


def python(arguments: list[str]) -> int:
    """Run a module of this Python in the root of the repository, its output shown as it comes."""
    # Options from outside could switch the comparison of notebooks off without a word.
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    environment.setdefault("MINIGRPO_THREADS", "1")  # for each of the two processes
    print(f"$ python -m {' '.join(arguments)}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, check=False
    ).returncode


def check(run: Runner = python, notebooks: Path = ROOT / "notebooks") -> int:
    """Run every stage; returns the exit status."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        units, cells = Path(folder, "units.xml"), Path(folder, "cells.xml")
        strict = ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={CELL_TIMEOUT}"]
        strict += [f"--ignore=notebooks/{path.name}" for path in left_out(notebooks)]
        for stage in (
            ["ruff", "check", "."],
            ["ruff", "format", "--check", "."],
            ["pytest", "-q", *PARALLEL, f"--junitxml={units}", "tests"],
            ["pytest", "-v", *PARALLEL, f"--junitxml={cells}", *strict, "notebooks"],
        ):
            status = run(stage)
            if status:
                print(f"FAILED with status {status}: python -m {' '.join(stage)}")
                return status
        return summarize(Report.read(units), Report.read(cells), notebooks, start)


def left_out(notebooks: Path) -> list[Path]:
    """The notebooks that need a library that is not installed (there is no TRL for Python 3.10)."""
    return [path for path in sorted(notebooks.glob("*.ipynb")) if lacks(path)]


def summarize(units: Report, cells: Report, notebooks: Path, start: float) -> int:
    """Print the last line; a run in which something was not tested at all has failed."""
    there = {path.name for path in notebooks.glob("*.ipynb")}
    out = left_out(notebooks)
    there -= {path.name for path in out}
    compared = {name for name in there if any(_names(file, name) for file in cells.files)}
    if not units.passed or not there or compared != there:
        missing = ", ".join(sorted(there - compared)) or "none"
        print(f"FAILED: {units.passed} unit tests passed; notebooks without a cell: {missing}")
        return 1
    skipped = units.skipped + cells.skipped
    skipped += [f"{path.name}: {lacks(path)} is not installed" for path in out]
    for reason in skipped:
        print(f"skipped: {reason}")
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    print(
        f"passed: {units.passed} unit tests, {cells.passed} notebook cells in "
        f"{len(compared)} notebook{'s' if len(compared) > 1 else ''}, ruff clean"
        f"{f', {len(skipped)} skipped' if skipped else ''} "
        f"({f'{minutes} min ' if minutes else ''}{seconds} s)"
    )
    return 0


def _names(junit_file: str, notebook: str) -> bool:
    """Whether a dotted junit class name ("notebooks.01_char_gpt") is that of a notebook file."""
    return notebook.removesuffix(".ipynb") in junit_file.removesuffix(".ipynb").split(".")


if __name__ == "__main__":
    sys.exit(check())
