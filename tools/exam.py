"""Run the whole course with your answers, and write down what you solved.

    python tools/exam.py [--only 02]    make exam: build/exam/index.html

Your notebooks are read and left as they are. Where a stub is still empty, your last answer that
passed is put in its place. The notebooks run strictly (MINIGRPO_STRICT=1): a check that isn't
passed raises. The exam writes that down, and goes on with the course's version. Your file of
progress is read and left alone, and nothing leaves this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import nbformat
from committed import CourseError, read, write
from course import ANSI, AT_A_TIME, choose, kernel_environment, lacks, status_of
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode
from pages import title_of
from update import CHECK, exercises, parameters, source

from minigrpo.notebook import kept, progress

ROOT = Path(__file__).resolve().parent.parent
NOT_ATTEMPTED = "using the course's version"
"""What the message of a check contains if its stub is as it was."""
STRICT = "import os\nos.environ['MINIGRPO_STRICT'] = '{}'"
REFERENCE = "from minigrpo.exercises.reader import find\n{name} = find('{key}').reference"


@dataclass
class Result:
    """What became of one notebook.

    Attributes:
        name: of its file, without the ending.
        title: its first heading.
        keys: of its exercises, in order.
        said: for each exercise that didn't pass, what its check said.
        passed: the keys of those that passed.
        errors: of cells that are no checks, each with where it happened.
        seconds: how long it took.
        ended: whether every cell was run.
    """

    name: str
    title: str
    keys: list[str]
    said: dict[str, str] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    ended: bool = False

    def status(self, key: str) -> str:
        """Of an exercise: passed, not passed or not attempted."""
        if NOT_ATTEMPTED in self.said.get(key, NOT_ATTEMPTED):
            return "passed" if key in self.passed and key not in self.said else "not attempted"
        return "not passed"


def with_answers(nb: NotebookNode, remembered: dict[str, dict]) -> NotebookNode:
    """Put the remembered answers in the place of the stubs that are still empty."""
    for key, name, cells in exercises(nb):
        code = "\n\n\n".join(map(source, cells))
        answer = remembered.get(key, {}).get("source")
        if cells and answer and parameters(code, name) is None:
            cells[-1]["source"] = answer
    return nb


async def examine(
    nb: NotebookNode, result: Result, folder: Path, timeout: float, at_a_time: int
) -> None:
    """Run every cell in a fresh kernel, whatever the ones before it did."""
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(nb, kernel_name="python3", timeout=timeout, resources=resources)
    client.shutdown_kernel = "immediate"  # one that is busy would be waited for
    client.reset_execution_trackers()
    environment = {**kernel_environment(at_a_time, kept.path()), "MINIGRPO_STRICT": "1"}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        async with client.async_setup_kernel(env=environment, stderr=log):
            try:
                for index, cell in enumerate(nb.cells):
                    await one_cell(client, cell, index, result)
                result.ended = True
            except CellTimeoutError:
                result.errors.append(f"{where(cell)}: no end after {timeout:g} seconds")
            except RuntimeError as error:  # DeadKernelError is one
                result.errors.append(f"{where(cell)}: {error}")
    result.seconds = time.perf_counter() - began


async def one_cell(client: NotebookClient, cell: NotebookNode, index: int, result: Result) -> None:
    """Run a cell. After a check that isn't passed, what follows has the course's version."""
    if not (failed := await error_of(client, cell, index)):
        return
    kind, message = failed
    first = f"{kind}: {(message.splitlines() or [''])[0]}"
    if not (check := CHECK.search(cell.source)):
        result.errors.append(f"{where(cell)}: {first}")
        return
    key, name = check.groups()
    result.said[key] = message if message.startswith(f"{key} (") else first

    async def run(code: str) -> tuple[str, str] | None:
        return await error_of(client, nbformat.v4.new_code_cell(code, id=cell.id), index)

    await run(STRICT.format(0))
    if await run(cell.source):  # there is no function to check: its cell has an error, perhaps
        await run(REFERENCE.format(name=name, key=key))
    await run(STRICT.format(1))


async def error_of(
    client: NotebookClient, cell: NotebookNode, index: int
) -> tuple[str, str] | None:
    """Run a cell; kind and message of the error it raises, or None."""
    try:
        await client.async_execute_cell(cell, index)
    except CellExecutionError as error:
        return error.ename, ANSI.sub("", error.evalue)
    return None


def where(cell: NotebookNode) -> str:
    return f"cell {cell.id}"


async def examine_all(
    todo: list[tuple[NotebookNode, Result]], folder: Path, timeout: float
) -> None:
    """Some at a time; prints a line when one is done."""

    def refuse(*ignored: object) -> None:
        raise RuntimeError  # nbclient then leaves Ctrl-C to asyncio

    asyncio.get_running_loop().add_signal_handler = refuse
    at_a_time = min(AT_A_TIME, len(todo))
    places = asyncio.Semaphore(at_a_time)

    async def examine_in_turn(nb: NotebookNode, result: Result) -> None:
        async with places:
            await examine(nb, result, folder, timeout, at_a_time)
        passed = kept.recall("exercises")
        result.passed = {key for key in result.keys if key in passed}
        print(f"{result.name}: {counted([result])} in {result.seconds:.0f} s", flush=True)

    await asyncio.gather(*(examine_in_turn(nb, result) for nb, result in todo))


def counted(results: list[Result]) -> str:
    """Such as "2 of 6 exercises passed"."""
    states = [result.status(key) for result in results for key in result.keys]
    return f"{states.count('passed')} of {len(states)} exercises passed"


# ---------------------------------------------------------------------------------------------
# the page

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #57606a; --line: #d0d7de; --paper: #fff;
  --good: #1a7f37; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b1; --line: #3d444d;
  --paper: #0d1117; --good: #56d364; --bad: #ff9492; } }
body { font: 1em/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2em auto; max-width: 50em; padding: 0 1em; }
h2 { font-size: 1.15em; margin: 2em 0 0.3em; }
p { margin: 0.3em 0; }
table { border-collapse: collapse; width: 100%; }
th, td { border-top: 1px solid var(--line); padding: 0.35em 1em 0.35em 0; text-align: left;
  vertical-align: top; }
th { font-weight: normal; }
thead th, .not.attempted, footer { color: var(--soft); }
td:last-child { padding-right: 0; white-space: nowrap; }
.passed { color: var(--good); }
.not.passed, .stopped { color: var(--bad); }
pre { font-size: 0.85em; margin: 0.4em 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { :root { --ink: #000; --soft: #444; --line: #999; --paper: #fff; --good: #000;
  --bad: #000; } body { margin: 0; } tr, h2 { break-inside: avoid; break-after: avoid; } }
"""
MARKS = {"passed": "✓", "not passed": "✗", "not attempted": "–"}


def page(results: list[Result], left_out: dict[str, str], titles: dict[str, str]) -> str:
    """The whole page."""
    parts = [f"<h1>minigrpo: what you solved</h1><p>{date.today():%B %d, %Y}</p>"]
    parts.append(f"<p><strong>{counted(results)}</strong></p>")
    parts += [section(result, titles) for result in results]
    parts += [
        f"<h2>{html.escape(name)}</h2><p>not run: {html.escape(library)} isn't installed</p>"
        for name, library in left_out.items()
    ]
    drawn = progress.Progress()
    if drawn.guesses:
        head = ("prediction", "your guess", "came out at")
        rows = [
            (html.escape(key), guess, value or "not yet") for key, guess, value in drawn.guesses
        ]
        parts.append("<h2>Predictions</h2>" + table(head, rows))
    parts.append(f"<h2>Diagnoses</h2><p>{html.escape(drawn.clinic)}</p>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>minigrpo: what you solved</title>\n<style>{STYLE}</style>\n</head>\n"
        + "\n".join(["<body>", "<main>", *parts])
        + "\n</main>\n</body>\n</html>\n"
    )


def section(result: Result, titles: dict[str, str]) -> str:
    """One notebook: whether it ran to its end, and its exercises."""
    ran = f"Ran to its end in {result.seconds:.0f} seconds."
    if not result.ended:
        ran = '<span class="stopped">Did not run to its end.</span>'
    elif result.errors:
        ran += ' <span class="stopped">Some cells raised an error.</span>'
    told = "".join(f"<pre>{html.escape(error)}</pre>" for error in result.errors)
    rows = []
    for key in result.keys:
        status = result.status(key)
        said = html.escape(result.said.get(key, "")) if status == "not passed" else ""
        more = f"<pre>{said}</pre>" if said else ""
        mark = f'<span class="{status}"><span aria-hidden="true">{MARKS[status]}</span> {status}'
        rows.append((key, html.escape(titles.get(key, "")) + more, f"{mark}</span>"))
    head = ("exercise", "", "result")
    return f"<h2>{html.escape(result.title)}</h2><p>{ran}</p>{told}{table(head, rows)}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """The cells are HTML already."""
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = [f"<thead><tr>{names}</tr></thead>"]
    for first, *others in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return f"<table>{''.join(lines)}</table>"


# ---------------------------------------------------------------------------------------------


@contextmanager
def another_file(known: dict[str, dict[str, dict]]) -> Iterator[None]:
    """For the length of a block a file of progress with this in it; the reader's is left alone."""
    before = os.environ.get("MINIGRPO_PROGRESS")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINIGRPO_PROGRESS"] = str(Path(folder, "progress.db"))
        for section, values in known.items():
            for key, value in values.items():
                kept.remember(section, key, value)
        try:
            yield
        finally:
            del os.environ["MINIGRPO_PROGRESS"]
            os.environ.update({} if before is None else {"MINIGRPO_PROGRESS": before})


def exam(paths: list[Path], out: Path, timeout: float) -> None:
    """Run the notebooks and write the page."""
    remembered = kept.recall("exercises")
    known = {section: kept.recall(section) for section in ("predictions", "clinic")}
    left_out = {path.stem: str(lacks(path)) for path in paths if lacks(path)}
    todo = []
    for path in (path for path in paths if not lacks(path)):
        nb = with_answers(read(path), remembered)
        number = path.stem.split("_")[0]
        keys = [key for n, _, keys in progress.exercises() for key in keys if n == int(number)]
        todo.append((nb, Result(path.stem, title_of(nb, path.stem), keys)))
    with another_file(known):
        asyncio.run(examine_all(todo, paths[0].parent, timeout))
        from minigrpo.exercises import all_exercises  # loads torch, which is slow

        titles = {exercise.key: exercise.title for exercise in all_exercises()}
        results = [result for _, result in todo]
        out.mkdir(parents=True, exist_ok=True)
        write(out / "index.html", page(results, left_out, titles))
    print(f"{counted(results)}; read on: {out / 'index.html'}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status, which is 0 whatever was solved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NUMBER", help="one notebook, such as 02")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per cell (600)")
    parser.add_argument("--notebooks", type=Path, default=ROOT / "notebooks", help="their folder")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "exam", help="for the page")
    options = parser.parse_args(arguments)

    def act() -> None:
        paths = choose(options.notebooks.resolve(), options.only, scale=True)
        exam(paths, options.out.resolve(), options.timeout)

    return status_of(act, CourseError, OSError, RuntimeError)  # no kernel is a RuntimeError


if __name__ == "__main__":
    sys.exit(main())
