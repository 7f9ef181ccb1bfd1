"""Execute the notebooks of the course without a browser.

    python tools/course/course.py run [--only 02]        pages to read in build/course/
    python tools/course/course.py execute [--only 02]    in place, as they are committed

Both execute the notebooks of course.toml in order, each in a fresh kernel, and stop at the first
failure with exit status 1; `run` has two of them going at a time where there are two cores. A
notebook that needs more than the packages of requirements.txt is left out, unless `--scale` or its
number asks for it.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import committed
from committed import CourseError
from kernels import AT_A_TIME, each, environment, execute, status_of
from listing import ROOT, Notebook, notebooks
from nbformat import NotebookNode

sys.path.append(str(ROOT / "tools" / "site"))
from website import begin, write_index, write_page


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
    needs = (notebook.needs for notebook in notebooks() if notebook.stem == path.stem)
    return next(filter(missing, needs), None)


async def executed(notebook: Notebook, at_a_time: int) -> NotebookNode:
    """The notebook after a run, in the form it is committed in; the file is left as it is.

    It knows no reader, whose measurements in the clinic are few.
    """
    nb = committed.read(notebook.location)
    with tempfile.TemporaryDirectory() as folder:
        nobody = environment(at_a_time, MINIGRPO_PROGRESS=str(Path(folder, "progress.db")))
        try:
            await execute(notebook, nb, nobody)
        except CourseError as error:
            raise CourseError(f"{notebook.file}, {error}") from error
    return committed.committed_form(nb)


def store(notebook: Notebook, nb: NotebookNode) -> None:
    """Into its file, with the solution below each exercise, if it is fit for that.

    What answers a question goes into a file of its own.
    """
    if findings := committed.uncommittable(nb):
        raise CourseError(f"{notebook.file} is left as it was: " + "\n  ".join(findings))
    nb.cells = committed.with_solutions(nb.cells)
    apart = committed.without_predicted(nb)
    outputs = json.dumps(apart, indent=1, sort_keys=True, ensure_ascii=False)
    committed.write(committed.predicted(notebook.location), outputs + "\n")
    committed.write(notebook.location, committed.as_json(nb))


def act_on(chosen: list[Notebook], command: str) -> None:
    """Execute notebooks, and write pages, those of the others as they are stored, or the files."""
    for notebook in chosen:
        if missing(notebook.needs):
            raise CourseError(
                f"{notebook.stem} needs {notebook.needs}, which comes with the extra `scale` "
                "(Python 3.11 or newer): add SCALE=1, as in make course SCALE=1"
            )
    root, at_a_time = chosen[0].root, min(AT_A_TIME, len(chosen)) if command == "run" else 1
    out, began = root / "build" / "course", time.perf_counter()
    if command == "run":
        begin(root, out)

    async def act(notebook: Notebook) -> str:
        begun = time.perf_counter()
        nb = await executed(notebook, at_a_time)
        if command == "run":
            write_page(nb, notebook.location, out, time.perf_counter() - begun)
            write_index(root, out)
        else:
            store(notebook, nb)
        return f"{sum(cell.cell_type == 'code' for cell in nb.cells)} cells"

    asyncio.run(each(chosen, act, at_a_time))
    if command == "run":
        print(f"{time.perf_counter() - began:.0f} s in all; read on: {out / 'index.html'}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "execute"])
    parser.add_argument("--only", metavar="NUMBER", help="one notebook, such as 02")
    parser.add_argument("--scale", action="store_true", help="those that need `scale` as well")
    parser.add_argument("--root", type=Path, default=ROOT, help="another course")
    given = parser.parse_args(arguments)
    chosen = partial(choose, given.root.resolve(), given.only, given.scale)
    return status_of(lambda: act_on(chosen(), given.command))


if __name__ == "__main__":
    sys.exit(main())
