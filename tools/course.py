"""Execute the notebooks of the course without a browser.

    python tools/course.py run [--only 02]        pages to read in build/course/
    python tools/course.py execute [--only 02]    the notebooks in place, as they are committed

Both execute the notebooks of notebooks/ in order, each in a fresh kernel, and stop at the first
failure with exit status 1; `run` has two of them going at a time where there are two cores. A
notebook that needs more than the packages of requirements.txt is left out, unless `--scale` or its
number asks for it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import website
from committed import CourseError, as_json, committed_form, read, uncommittable, write
from explorer_page import write_explorer
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode
from solutions import with_solutions
from website import remove_page, remove_stale, write_page

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {"10_scaling_out": "trl"}
"""Notebooks that need a library of the extra `scale`, and which."""
TRACEBACK_LINES = 12  # of a failure, the last ones: they name the line and the error
AT_A_TIME = min(2, os.cpu_count() or 1)
"""Notebooks that `run` has going: with a core each they are done sooner than one with all cores."""
# Notebooks by the time they take; the others come after them.
LONGEST = ["01_char_gpt", "07_grpo", "10_scaling_out", "08_bug_clinic", "03_sequence_grpo"]
LONGEST += ["09_text_models", "06_a_llama_that_answers", "05_kl_and_family"]
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# ---------------------------------------------------------------------------------------------
# choosing and executing


def choose(folder: Path, only: str | None = None, scale: bool = False) -> list[Path]:
    """The notebooks of `folder` in order, or the one whose number is `only` ("02" or "2").

    Those that need the extra `scale` are among them only if asked for.
    """
    every = sorted(folder.glob("*.ipynb"))
    if not every:
        raise CourseError(f"there is no notebook in {folder}")
    if only is None:
        return [path for path in every if scale or path.stem not in NEEDS]
    chosen = [path for path in every if path.stem.split("_")[0].lstrip("0") == only.lstrip("0")]
    if not chosen:
        names = ", ".join(path.stem for path in every)
        raise CourseError(f"there is no notebook {only!r}; there are: {names}")
    return chosen


def lacks(path: Path) -> str | None:
    """The library that a notebook needs and that is not installed, or None."""
    library = NEEDS.get(path.stem)
    return library if library and find_spec(library) is None else None


def check_installed(paths: list[Path]) -> None:
    """Before anything is executed, say which library is missing and how it is installed."""
    for path in paths:
        if lacks(path):
            raise CourseError(
                f"{path.stem} needs {lacks(path)}, which comes with the extra `scale` (Python 3.11 "
                "or newer): add SCALE=1, as in make course SCALE=1"
            )


def kernel_environment(at_a_time: int = 1, progress: Path | None = None) -> dict[str, str]:
    """The environment of a kernel: imports minigrpo from any folder, draws figures inline.

    One of several kernels gets a single thread, unless the user has set the number.
    """
    alone = {} if at_a_time == 1 else {"MINIGRPO_THREADS": "1"}
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **alone,
        **os.environ,
        **({"MINIGRPO_PROGRESS": str(progress)} if progress else {}),
        "PYTHONPATH": os.pathsep.join(paths),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }


async def execute(
    path: Path, timeout: float, at_a_time: int = 1, progress: Path | None = None
) -> NotebookNode:
    """Execute the notebook at `path` in a fresh kernel, in its own folder.

    Args:
        timeout: seconds that one cell may take.
        at_a_time: how many notebooks are being executed.
        progress: the file of progress, instead of the reader's.

    Returns the executed notebook, in the form it is committed in; the file is left as it is.

    Raises:
        CourseError: names the notebook, the cell and the error.
    """
    nb = read(path)
    code = [cell.id for cell in nb.cells if cell.cell_type == "code"]
    where = "before its first code cell"

    def starting(cell: NotebookNode, cell_index: int) -> None:
        nonlocal where
        if cell.cell_type == "code":
            where = f"code cell {code.index(cell.id) + 1} (id {cell.id})"

    client = NotebookClient(
        nb,
        kernel_name="python3",
        timeout=timeout,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=starting,
        shutdown_kernel="immediate",  # one that is busy would be waited for
    )
    # The log of the kernel process: its advice would stand between the lines of progress.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            await client.async_execute(env=kernel_environment(at_a_time, progress), stderr=log)
            return committed_form(nb)
        except CellExecutionError as error:
            # nbclient puts the cell's source and output first, and a line of dashes after them.
            last = ANSI.sub("", error.traceback).rstrip().rpartition("-" * 18 + "\n")[2]
            what, lines = ANSI.sub("", f"{error.ename}: {error.evalue}"), last.splitlines()
            cause: Exception = error
        except CellTimeoutError as error:
            what, lines, cause = f"TimeoutError: no end after {timeout:g} seconds", [], error
        except (RuntimeError, OSError) as error:  # DeadKernelError is one: out of memory?
            log.seek(0)
            what, lines, cause = f"{type(error).__name__}: {error}", log.read().splitlines(), error
    text = "\n".join([what, *lines[-TRACEBACK_LINES:]])
    raise CourseError(f"{path.name}, {where}: {text}") from cause


async def each(
    paths: list[Path],
    timeout: float,
    done: Callable[[NotebookNode, Path, float], None],
    at_a_time: int = 1,
    progress: Path | None = None,
) -> None:
    """Execute notebooks in order and hand each to `done`; at the first failure all stop."""

    def refuse(*ignored: object) -> None:
        raise RuntimeError  # nbclient then leaves Ctrl-C to asyncio, which cancels the tasks below

    asyncio.get_running_loop().add_signal_handler = refuse
    at_a_time = min(at_a_time, len(paths))
    places = asyncio.Semaphore(at_a_time)

    async def run_notebook(number: int, path: Path) -> None:
        await places.acquire()  # a failure keeps its place, so that nothing follows it
        head, began = f"[{number}/{len(paths)}] {path.stem}", time.perf_counter()
        try:
            nb = await execute(path, timeout, at_a_time, progress)
            done(nb, path, time.perf_counter() - began)
        except BaseException:
            print(f"{head}: stopped after {time.perf_counter() - began:.1f} s", flush=True)
            raise
        cells = sum(cell.cell_type == "code" for cell in nb.cells)
        print(f"{head}: {cells} cells in {time.perf_counter() - began:.1f} s", flush=True)
        places.release()

    order = [*enumerate(paths, start=1)]
    if at_a_time > 1:  # the longest first, so that no core waits for the other at the end
        order.sort(key=lambda entry: [*LONGEST, entry[1].stem].index(entry[1].stem))
    tasks = [asyncio.create_task(run_notebook(number, path)) for number, path in order]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()  # one that has ended does not mind
        await asyncio.gather(*tasks, return_exceptions=True)  # until their kernels are gone


# ---------------------------------------------------------------------------------------------
# the folder of the pages


def write_index(folder: Path, out: Path) -> None:
    """Write index.html and the pages beside those of the notebooks."""
    write_explorer(out)
    website.write_index(choose(folder, scale=True), out, NEEDS)


# ---------------------------------------------------------------------------------------------
# the two commands


def run(paths: list[Path], out: Path, timeout: float) -> None:
    """Execute notebooks and write their pages; afterwards there is no page that is out of date."""
    began, folder = time.perf_counter(), paths[0].parent
    out.mkdir(parents=True, exist_ok=True)
    remove_stale(folder, out)
    for path in paths:
        remove_page(path, out)
    write_index(folder, out)

    def done(nb: NotebookNode, path: Path, seconds: float) -> None:
        write_page(nb, path, out, seconds)
        write_index(folder, out)

    with tempfile.TemporaryDirectory() as store:  # a reader's measurements in the clinic are few
        asyncio.run(each(paths, timeout, done, AT_A_TIME, Path(store, "progress.db")))
    print(f"{time.perf_counter() - began:.0f} s in all; read on: {out / 'index.html'}")


def execute_in_place(paths: list[Path], timeout: float) -> None:
    """Execute notebooks and store their outputs, with the solution below each exercise.

    A notebook not fit for that is left untouched.
    """

    def done(nb: NotebookNode, path: Path, seconds: float) -> None:
        findings = uncommittable(nb)
        if findings:
            raise CourseError(f"{path.name} is left as it was: " + "\n  ".join(findings))
        nb.cells = with_solutions(nb.cells)
        write(path, as_json(nb))
        progress_file.unlink(missing_ok=True)

    with tempfile.TemporaryDirectory() as folder:  # what is committed knows no reader
        progress_file = Path(folder, "progress.db")
        asyncio.run(each(paths, timeout, done, progress=progress_file))


def status_of(act: Callable[[], None], *told: type[Exception]) -> int:
    """The exit status of a command. Errors of the types `told`, and Ctrl-C, end it in one line."""
    try:
        act()
    except told as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "execute"])
    parser.add_argument("--only", metavar="NUMBER", help="one notebook, such as 02")
    parser.add_argument("--scale", action="store_true", help="those that need `scale` as well")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per cell (600)")
    parser.add_argument("--notebooks", type=Path, default=ROOT / "notebooks", help="their folder")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "course", help="for the pages")
    options = parser.parse_args(arguments)

    def act() -> None:
        paths = choose(options.notebooks.resolve(), options.only, options.scale)
        check_installed(paths)
        if options.command == "run":
            run(paths, options.out.resolve(), options.timeout)
        else:
            execute_in_place(paths, options.timeout)

    return status_of(act, CourseError)


if __name__ == "__main__":
    sys.exit(main())
