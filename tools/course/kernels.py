"""Notebooks in kernels: a fresh one for each, some at a time, and none is left on a failure."""

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable

from committed import CourseError
from listing import ROOT, Notebook
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

# Notebooks that are going: with a core each they are done sooner than one with all cores.
AT_A_TIME = min(2, os.cpu_count() or 1)
TIMEOUT = 600  # seconds that a cell may take
TRACEBACK_LINES = 12  # of a failure, the last ones: they name the line and the error
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def environment(at_a_time: int = 1, **more: str) -> dict[str, str]:
    """That of a kernel: it imports minigrpo from any folder, and draws figures inline.

    One of several kernels gets a single thread, unless the user has set the number.
    """
    alone = {} if at_a_time == 1 else {"MINIGRPO_THREADS": "1"}
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    draws = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    return {**alone, **os.environ, **draws, **more, "PYTHONPATH": os.pathsep.join(paths)}


def place(nb: NotebookNode, index: int) -> str:
    """Such as "code cell 3 (id loss-figure)"."""
    number = sum(cell.cell_type == "code" for cell in nb.cells[: index + 1])
    return f"code cell {number} (id {nb.cells[index].id})" if number else "the first code cell"


async def execute(
    notebook: Notebook, nb: NotebookNode, environment: dict[str, str], allow_errors: bool = False
) -> None:
    """Run the cells `nb` of a notebook in a fresh kernel, in the notebook's folder.

    A CourseError says in which cell the kernel died, the time was up, or an error was raised, if
    those are not allowed.
    """
    at = 0

    def begin(cell: NotebookNode, cell_index: int) -> None:
        nonlocal at
        at = cell_index

    resources = {"metadata": {"path": str(notebook.location.parent)}}
    client = NotebookClient(nb, kernel_name="python3", timeout=TIMEOUT, resources=resources)
    client.allow_errors, client.on_cell_start = allow_errors, begin
    client.shutdown_kernel = "immediate"  # one that is busy would be waited for
    # The log of the kernel process: its advice would stand between the lines of progress.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            await client.async_execute(env=environment, stderr=log)
        except CellExecutionError as error:
            # nbclient puts the cell's source and output first, and a line of dashes after them.
            last = error.traceback.rstrip().rpartition("-" * 18 + "\n")[2]
            what, lines = f"{error.ename}: {error.evalue}", last.splitlines()
        except CellTimeoutError:
            what, lines = f"TimeoutError: no end after {TIMEOUT} seconds", []
        except (RuntimeError, OSError) as error:  # DeadKernelError is one: out of memory?
            log.seek(0)
            what, lines = f"{type(error).__name__}: {error}", log.read().splitlines()
        else:
            return
    told = "\n".join([f"{place(nb, at)}: {what}", *lines[-TRACEBACK_LINES:]])
    raise CourseError(ANSI.sub("", told))


async def each(
    notebooks: list[Notebook], act: Callable[[Notebook], Awaitable[str]], at_a_time: int = 1
) -> None:
    """Call `act` for each notebook and print what it returns; at the first failure all stop."""

    def refuse(*ignored: object) -> None:
        raise RuntimeError  # nbclient then leaves Ctrl-C to asyncio, which cancels the tasks below

    loop = asyncio.get_running_loop()
    loop.add_signal_handler = refuse
    # Python 3.10 would print what the tasks raise that Ctrl-C ends; they're awaited below.
    loop.set_exception_handler(lambda *ignored: None)
    places = asyncio.Semaphore(at_a_time)

    async def one(number: int, notebook: Notebook) -> None:
        await places.acquire()  # a failure keeps its place, so that nothing follows it
        said, began = "stopped after", time.perf_counter()
        try:
            said = f"{await act(notebook)} in"
        finally:
            took = f"{time.perf_counter() - began:.1f} s"
            print(f"[{number}/{len(notebooks)}] {notebook.stem}: {said} {took}", flush=True)
        places.release()

    order = [*enumerate(notebooks, start=1)]
    if at_a_time > 1:  # the longest first, so that no core waits for the other at the end
        order.sort(key=lambda entry: -entry[1].seconds)
    tasks = [asyncio.create_task(one(*entry)) for entry in order]
    try:
        # Not gather, which Ctrl-C would have cancel them first: a kernel then seems to have died.
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()  # one that has ended does not mind
        await asyncio.gather(*tasks, return_exceptions=True)  # until their kernels are gone


def status_of(act: Callable[[], None]) -> int:
    """The exit status of a command. What is wrong with the course, and Ctrl-C, take one line."""
    try:
        act()
    except (CourseError, OSError, RuntimeError) as error:  # no kernel is a RuntimeError
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
