"""Notebooks in kernels: a fresh one for each, some at a time, and none is left on a failure."""

from __future__ import annotations

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

AT_A_TIME = min(2, os.cpu_count() or 1)
"""Notebooks that are going: with a core each they are done sooner than one with all cores."""
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


def told(error: CellExecutionError) -> tuple[str, list[str]]:
    """What a cell has raised, and the end of the traceback."""
    # nbclient puts the cell's source and output first, and a line of dashes after them.
    last = ANSI.sub("", error.traceback).rstrip().rpartition("-" * 18 + "\n")[2]
    return ANSI.sub("", f"{error.ename}: {error.evalue}"), last.splitlines()[-TRACEBACK_LINES:]


async def execute(
    notebook: Notebook,
    nb: NotebookNode,
    timeout: float,
    environment: dict[str, str],
    failed: Callable[[NotebookClient, int, CellExecutionError], Awaitable[None]],
) -> None:
    """Run the cells `nb` of a notebook in a fresh kernel, in the notebook's folder.

    Args:
        timeout: seconds that one cell may take.
        failed: is awaited after a cell that raises an error, and may raise one to end it all.

    Raises:
        CourseError: says in which cell the kernel died or the time was up.
    """
    resources = {"metadata": {"path": str(notebook.location.parent)}}
    client = NotebookClient(nb, kernel_name="python3", timeout=timeout, resources=resources)
    client.shutdown_kernel = "immediate"  # one that is busy would be waited for
    client.reset_execution_trackers()
    index, lines = 0, []
    # The log of the kernel process: its advice would stand between the lines of progress.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            async with client.async_setup_kernel(env=environment, stderr=log):
                for index, cell in enumerate(nb.cells):
                    try:
                        number = client.code_cells_executed + 1
                        await client.async_execute_cell(cell, index, execution_count=number)
                    except CellExecutionError as error:
                        await failed(client, index, error)
            return
        except CellTimeoutError as error:
            what, cause = f"TimeoutError: no end after {timeout:g} seconds", error
        except (RuntimeError, OSError) as error:  # DeadKernelError is one: out of memory?
            log.seek(0)
            lines = log.read().splitlines()[-TRACEBACK_LINES:]
            what, cause = f"{type(error).__name__}: {error}", error
    raise CourseError("\n".join([f"{place(nb, index)}: {what}", *lines])) from cause


async def each(
    notebooks: list[Notebook], act: Callable[[Notebook], Awaitable[str]], at_a_time: int = 1
) -> None:
    """Call `act` for each notebook and print what it returns; at the first failure all stop."""

    def refuse(*ignored: object) -> None:
        raise RuntimeError  # nbclient then leaves Ctrl-C to asyncio, which cancels the tasks below

    asyncio.get_running_loop().add_signal_handler = refuse
    places = asyncio.Semaphore(at_a_time)

    async def one(number: int, notebook: Notebook) -> None:
        await places.acquire()  # a failure keeps its place, so that nothing follows it
        head, began = f"[{number}/{len(notebooks)}] {notebook.stem}", time.perf_counter()
        try:
            said = await act(notebook)
        except BaseException:
            print(f"{head}: stopped after {time.perf_counter() - began:.1f} s", flush=True)
            raise
        print(f"{head}: {said} in {time.perf_counter() - began:.1f} s", flush=True)
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
