"""What `make test` runs: lint, unit tests, and every notebook against its stored output.

Tests and notebooks go to two processes with one thread each, file by file, the longest first (see
conftest.py), so that both end at about the same time. The first stage that fails ends the run with
its exit status; otherwise the last line says how many passed. A notebook whose library there is not
for this Python is skipped, and the last lines say so.
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

ROOT = Path(__file__).resolve().parents[2]
PARALLEL = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
STRICT = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=600"]  # it waits for dead kernels

Runner = Callable[[list[str]], int]


@dataclass
class Report:
    """The outcome of a pytest run, read from its junit file."""

    units: int = 0  # tests that passed
    cells: dict[str, int] = field(default_factory=dict)  # of each notebook, those that passed
    skipped: list[str] = field(default_factory=list)  # "test: reason"

    @classmethod
    def read(cls, path: Path) -> Report:
        """Count the test cases of a junit file."""
        report = cls()
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            folder, _, file = case.get("classname", "").partition(".")
            skipped = case.find("skipped")
            if skipped is not None:
                name = f"{case.get('classname')}::{case.get('name')}"
                report.skipped.append(f"{name}: {skipped.get('message')}")
            elif case.find("failure") is not None or case.find("error") is not None:
                pass
            elif folder == "notebooks":
                name = file.removesuffix(".ipynb")
                report.cells[name] = report.cells.get(name, 0) + 1
            else:
                report.units += 1
        return report


def python(arguments: list[str]) -> int:
    """Run a module of this Python in the root of the repository, its output shown as it comes."""
    # Options from outside could switch the comparison of notebooks off without a word.
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    environment.setdefault("MINIGRPO_THREADS", "1")  # for each of the two processes
    # Nothing that is tested reaches another machine; notebook 01 has a corpus for such a case.
    paths = [str(ROOT / "tests" / "offline"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.setdefault("MINIGRPO_TEST_CONNECTIONS", os.devnull)
    print(f"$ python -m {' '.join(arguments)}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, check=False
    ).returncode


def check(run: Runner = python, notebooks: Path = ROOT / "notebooks") -> int:
    """Run every stage; returns the exit status."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        strict = [*STRICT, *(f"--ignore=notebooks/{path.name}" for path in left_out(notebooks))]
        for stage in (
            ["ruff", "check", "."],
            ["ruff", "format", "--check", "."],
            ["pytest", "-q", *PARALLEL, f"--junitxml={junit}", *strict, "notebooks", "tests"],
        ):
            status = run(stage)
            if status:
                print(f"FAILED with status {status}: python -m {' '.join(stage)}")
                return status
        return summarize(Report.read(junit), notebooks, start)


def left_out(notebooks: Path) -> list[Path]:
    """The notebooks that need a library that is not installed (there is no TRL for Python 3.10)."""
    return [path for path in sorted(notebooks.glob("*.ipynb")) if lacks(path)]


def summarize(report: Report, notebooks: Path, start: float) -> int:
    """Print the last line; a run in which something was not tested at all has failed."""
    out = left_out(notebooks)
    there = {path.stem for path in notebooks.glob("*.ipynb")} - {path.stem for path in out}
    if not report.units or not there or set(report.cells) != there:
        missing = ", ".join(sorted(there - set(report.cells))) or "none"
        print(f"FAILED: {report.units} unit tests passed; notebooks without a cell: {missing}")
        return 1
    skipped = report.skipped + [f"{path.name}: {lacks(path)} is not installed" for path in out]
    for reason in skipped:
        print(f"skipped: {reason}")
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    print(
        f"passed: {report.units} unit tests, {sum(report.cells.values())} notebook cells in "
        f"{len(there)} notebook{'s' if len(there) > 1 else ''}, ruff clean"
        f"{f', {len(skipped)} skipped' if skipped else ''} "
        f"({f'{minutes} min ' if minutes else ''}{seconds} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(check())
