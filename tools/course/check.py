"""What `make test` runs (lint, unit tests, every notebook against its output), and `make audit`.

    python tools/course/check.py test [tests | notebooks]
    python tools/course/check.py audit

Files go to one process per core, with one thread each, the longest first (see conftest.py). The
first command that fails ends the run with its exit status. A notebook whose library there is not
for this Python is left out, and a line says so.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

from course import ROOT, lacks

AUDIT = "tests/audit"
STRICT = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=600"]  # it waits for dead kernels


def cores() -> int:
    """Those that this process may use, which in a container are fewer than there are."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def commands(what: str, part: str = "") -> Iterator[list[str]]:
    """What is run, as arguments of `python -m`."""
    pytest = f"pytest -q -rs -n {cores()} --dist loadfile --no-loadscope-reorder".split()
    if what == "audit":
        yield [*pytest, AUDIT]
        return
    files = []
    if part in ("", "notebooks"):
        paths = sorted(path.relative_to(ROOT) for path in ROOT.glob("notebooks/*.ipynb"))
        files += [*STRICT, *(str(path) for path in paths if not lacks(path))]
        for path in filter(lacks, paths):
            print(f"left out: {path}, because {lacks(path)} is not installed")
    if part in ("", "tests"):
        yield ["ruff", "check", "."]
        yield ["ruff", "format", "--check", "."]
        files += ["tests", f"--ignore={AUDIT}"]
    yield [*pytest, *files]


def run(arguments: list[str]) -> int:
    """Run a module of this Python in the root of the repository, its output shown as it comes."""
    # Options from outside could switch the comparison of notebooks off without a word.
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    environment.setdefault("MINIGRPO_THREADS", "1")
    # Nothing that is tested reaches another machine; notebook 01 has a corpus for such a case.
    paths = [str(ROOT / "tests" / "offline"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.setdefault("MINIGRPO_TEST_CONNECTIONS", os.devnull)
    print(f"$ python -m {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    if arguments not in (["test"], ["test", "tests"], ["test", "notebooks"], ["audit"]):
        sys.exit(__doc__)
    return next(filter(None, map(run, commands(*arguments))), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
