"""Execute the notebooks of the course without a browser.

    python tools/course/course.py run [--only 02]        pages to read in build/course/
    python tools/course/course.py execute [--only 02]    in place, as they are committed

Both execute the notebooks of course.toml in order, each in a fresh kernel, and stop at the first
failure with exit status 1; `run` has two of them going at a time where there are two cores. A
notebook that needs more than the packages of requirements.txt is left out, unless `--scale` or its
number asks for it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from committed import CourseError, as_json, committed_form, read, uncommittable, write
from kernels import AT_A_TIME, each, environment, execute, place, status_of, told
from listing import ROOT, Notebook, notebooks
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from solutions import with_solutions

sys.path.append(str(ROOT / "tools" / "site"))
from website import begin, write_index, write_page

NEEDS = {notebook.stem: notebook.needs for notebook in notebooks() if notebook.needs}
"""Notebooks that need a library of the extra `scale`, and which."""


def choose(root: Path, only: str | None = None, scale: bool = False) -> list[Notebook]:
    """The notebooks of a course in order, or the one whose number is `only` ("02" or "2").

    Those that need the extra `scale` are among them only if asked for.
    """
    every = notebooks(root)
    if only is None:
        return [notebook for notebook in every if scale or not notebook.needs]
    chosen = [notebook for notebook in every if notebook.number.lstrip("0") == only.lstrip("0")]
    if not chosen:
        names = ", ".join(notebook.stem for notebook in every)
        raise CourseError(f"there is no notebook {only!r}; there are: {names}")
    return chosen


def missing(library: str) -> bool:
    return bool(library) and find_spec(library) is None


def lacks(path: Path) -> str | None:
    """The library that a notebook needs and that is not installed, or None."""
    library = NEEDS.get(path.stem, "")
    return library if missing(library) else None


async def executed(notebook: Notebook, timeout: float, at_a_time: int = 1) -> NotebookNode:
    """The notebook after a run, in the form it is committed in; the file is left as it is.

    It knows no reader, whose measurements in the clinic are few.

    Raises:
        CourseError: names the notebook, the cell and the error.
    """
    nb = read(notebook.location)

    async def failed(client: NotebookClient, index: int, error: CellExecutionError) -> None:
        what, lines = told(error)
        raise CourseError("\n".join([f"{place(nb, index)}: {what}", *lines])) from error

    with tempfile.TemporaryDirectory() as folder:
        nobody = environment(at_a_time, MINIGRPO_PROGRESS=str(Path(folder, "progress.db")))
        try:
            await execute(notebook, nb, timeout, nobody, failed)
        except CourseError as error:
            raise CourseError(f"{notebook.file}, {error}") from error
    return committed_form(nb)


def cells(nb: NotebookNode) -> str:
    return f"{sum(cell.cell_type == 'code' for cell in nb.cells)} cells"


def run(chosen: list[Notebook], out: Path, timeout: float) -> None:
    """Execute notebooks and write their pages, beside those of the others as they are stored."""
    began, root = time.perf_counter(), chosen[0].root
    at_a_time = min(AT_A_TIME, len(chosen))
    begin(root, out)

    async def act(notebook: Notebook) -> str:
        begun = time.perf_counter()
        nb = await executed(notebook, timeout, at_a_time)
        write_page(nb, notebook.location, out, time.perf_counter() - begun)
        write_index(root, out)
        return cells(nb)

    asyncio.run(each(chosen, act, at_a_time))
    print(f"{time.perf_counter() - began:.0f} s in all; read on: {out / 'index.html'}")


def execute_in_place(chosen: list[Notebook], timeout: float) -> None:
    """Execute notebooks and store their outputs, with the solution below each exercise.

    A notebook not fit for that is left untouched.
    """

    async def act(notebook: Notebook) -> str:
        nb = await executed(notebook, timeout)
        if findings := uncommittable(nb):
            raise CourseError(f"{notebook.file} is left as it was: " + "\n  ".join(findings))
        nb.cells = with_solutions(nb.cells)
        write(notebook.location, as_json(nb))
        return cells(nb)

    asyncio.run(each(chosen, act))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "execute"])
    parser.add_argument("--only", metavar="NUMBER", help="one notebook, such as 02")
    parser.add_argument("--scale", action="store_true", help="those that need `scale` as well")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per cell (600)")
    parser.add_argument("--root", type=Path, default=ROOT, help="another course")
    options = parser.parse_args(arguments)

    def act() -> None:
        root = options.root.resolve()
        chosen = choose(root, options.only, options.scale)
        for notebook in chosen:
            if missing(notebook.needs):
                raise CourseError(
                    f"{notebook.stem} needs {notebook.needs}, which comes with the extra `scale` "
                    "(Python 3.11 or newer): add SCALE=1, as in make course SCALE=1"
                )
        if options.command == "run":
            run(chosen, root / "build" / "course", options.timeout)
        else:
            execute_in_place(chosen, options.timeout)

    return status_of(act)


if __name__ == "__main__":
    sys.exit(main())
