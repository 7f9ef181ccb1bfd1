"""What every pytest run of this repository needs, the strict notebook run included.

pytest finds this file from any working directory. A kernel started by nbval inherits the
environment of pytest but not its `sys.path`, hence environment variables.
"""

import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).resolve().parent

_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(p for p in _paths if p)])

# An outer MPLBACKEND=Agg would leave the notebooks without figures. The inline backend needs no
# screen, so unit tests that draw are served as well.
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"


_progress = Path(tempfile.mkdtemp(prefix="minigrpo-progress-"))
os.environ["MINIGRPO_PROGRESS"] = str(_progress / "progress.db")
_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The reader's own file of progress stays out of it: each test has an empty one, and so has
    each notebook, whose cells share a kernel.
    """
    own = item.path.stem if item.path.suffix == ".ipynb" else str(next(_numbers))
    os.environ["MINIGRPO_PROGRESS"] = str(_progress / own / "progress.db")


def pytest_unconfigure() -> None:
    shutil.rmtree(_progress, ignore_errors=True)


# What takes long, the longest first, as a part of the names of its tests. These are seconds on one
# core; course.toml has those of the notebooks, unless one is tested in a folder of its own.
_seconds = {"test_exercise_notebooks": 140, "test_clinic": 120, "test_wheel": 60}
_seconds |= {"test_attacks": 55, "test_clinic_losses": 40, "test_course_tool": 25}
_seconds |= {"test_judge_reproductions": 20, "test_processes": 20, "test_mutants": 20}
_seconds |= dict.fromkeys(("test_judge_logits", "test_judge_adapters", "test_course_list"), 15)
_seconds |= {"test_exercises": 10, "test_stored_runs": 10, "test_diagnosis": 5}
if (ROOT / "course.toml").is_file():
    for notebook in tomllib.loads((ROOT / "course.toml").read_text("utf-8"))["notebook"]:
        _seconds[Path(notebook["file"]).stem] = notebook["seconds"]
LONGEST = sorted(_seconds, key=_seconds.get, reverse=True)
ALONE = "test_exercise_notebooks.py"  # each of its notebooks has a kernel of its own
PATIENTS = ("test_clinic.py", "test_measure.py")  # whose runs and measurements are kept


def share(nodeid: str) -> str:
    """What goes to one process as a whole: a file or two, or a notebook with its solutions."""
    file = nodeid.split("::")[0]
    return nodeid if file.endswith(ALONE) else "test_clinic.py" if file.endswith(PATIENTS) else file


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, the longest go first."""

    def place(item: pytest.Item) -> int:
        name = share(item.nodeid)
        return next((at for at, long in enumerate(LONGEST) if long in name), len(LONGEST))

    if hasattr(config, "workerinput"):
        items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A process gets a whole file: what a file has prepared, it prepares once."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        _split_scope = staticmethod(share)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give notebook cells a minute instead of 5 seconds to hand over their output, and compare
    those that answer a question with what is stored in tests/predicted/.

    nbval starts this clock when a cell has finished, and stops it when the output is complete: on
    a busy machine a figure can take longer, and a quick cell loses nothing.
    """
    if hasattr(item, "output_timeout"):
        item.output_timeout = 60
        item.cell.outputs = predicted(item.path).get(item.cell.id, item.cell.outputs)


@functools.cache
def predicted(notebook: Path) -> dict[str, list[NotebookNode]]:
    """The outputs of a notebook that a reader predicts, by the ids of their cells."""
    file = ROOT / "tests" / "predicted" / f"{notebook.stem}.json"
    return nbformat.from_dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}
