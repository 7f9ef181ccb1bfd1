"""Run the whole course with your answers, and write down what you solved.

    python tools/course/exam.py [--only 02]    make exam: build/exam/index.html

Your notebooks are read and left as they are. Where a stub is still empty, your last answer that
passed is put in its place. What a check says is written down, and where you have no answer that
passes, the notebook goes on with the course's version. Your progress is read and left alone, and
nothing leaves this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import nbformat
from committed import CourseError, read, write
from course import choose, missing
from kernels import AT_A_TIME, each, environment, execute, place, status_of, told
from listing import ROOT, Notebook
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from shell import WEB
from update import CHECK, STUB, exercises, source

from minigrpo.notebook import kept, progress

REFERENCE = "from minigrpo.exercises.reader import find\n{name} = find('{key}').reference"
NOT_ATTEMPTED = "Write yours above"  # says a check


@dataclass
class Result:
    """What became of one notebook."""

    notebook: Notebook
    said: dict[str, str] = field(default_factory=dict)  # by its checks
    errors: list[str] = field(default_factory=list)  # of cells that are no checks
    seconds: float | None = None  # None if it didn't run to its end

    @property
    def keys(self) -> list[str]:
        """Of its exercises, in order."""
        number = self.notebook.number.lstrip("0")
        return [f"{number}.{place + 1}" for place in range(self.notebook.exercises)]

    def status(self, key: str) -> str:
        """Of an exercise: passed, not passed or not attempted."""
        said = self.said.get(key, NOT_ATTEMPTED)
        if NOT_ATTEMPTED in said:
            return "not attempted"
        return "passed" if "): passed," in said.partition("\n")[0] else "not passed"


def with_answers(nb: NotebookNode, remembered: dict[str, dict]) -> NotebookNode:
    """Put the remembered answers in the place of the stubs that are still empty."""
    for key, _, cells in exercises(nb):
        answer = remembered.get(key, {}).get("source")
        if answer and cells and STUB.search(source(cells[-1])):
            cells[-1]["source"] = answer
    return nb


async def examine(result: Result, nb: NotebookNode, timeout: float, at_a_time: int) -> str:
    """Run every cell, whatever the ones before it did; returns what is to be printed."""

    async def failed(client: NotebookClient, index: int, error: CellExecutionError) -> None:
        first, check = told(error)[0].splitlines()[0], CHECK.search(nb.cells[index].source)
        if not check:
            result.errors.append(f"{place(nb, index)}: {first}")
            return
        key, name = check.groups()  # there is no such function: its cell has an error
        result.said[key] = first
        reference = nbformat.v4.new_code_cell(REFERENCE.format(name=name, key=key))
        await client.async_execute_cell(reference, index)

    for cell in nb.cells:
        cell.update({"outputs": []} if cell.cell_type == "code" else {})
    began = time.perf_counter()
    try:
        await execute(result.notebook, nb, timeout, environment(at_a_time), failed)
        result.seconds = time.perf_counter() - began
    except CourseError as error:
        result.errors.append(str(error).splitlines()[0])
    for cell in nb.cells:
        printed = "".join(output.get("text", "") for output in cell.get("outputs", []))
        if printed and (check := CHECK.search(cell.source)):
            result.said[check[1]] = printed
    return counted([result])


def counted(results: Iterable[Result]) -> str:
    """Such as "2 of 6 exercises passed"."""
    states = [result.status(key) for result in results for key in result.keys]
    return f"{states.count('passed')} of {len(states)} exercises passed"


# ---------------------------------------------------------------------------------------------
# the page, in the style of the others

STYLE = """
#main { margin: 2rem auto; padding: 0 1rem; }
td:last-child { white-space: nowrap; } td pre { white-space: pre-wrap; }
.passed { color: var(--string); } .not.passed { color: var(--wrong); }
"""
MARKS = {"passed": "✓", "not passed": "✗", "not attempted": "–"}


def page(results: list[Result], left_out: list[Notebook], titles: dict[str, str]) -> str:
    """The whole page."""
    drawn = progress.Progress()
    parts = [f"<h1>minigrpo: what you solved</h1><p>{date.today():%B %d, %Y}</p>"]
    parts += [f"<p><strong>{counted(results)}</strong></p>"]
    parts += [section(result, titles) for result in results]
    parts += [
        f"<h2>{html.escape(notebook.title)}</h2><p>not run: {notebook.needs} isn't installed</p>"
        for notebook in left_out
    ]
    guesses = [(html.escape(key), guess, value or "not yet") for key, guess, value in drawn.guesses]
    if guesses:
        head = ("prediction", "your guess", "came out at")
        parts.append("<h2>Predictions</h2>" + table(head, guesses))
    parts.append(f"<h2>Diagnoses</h2><p>{html.escape(drawn.clinic)}</p>")
    css = (WEB / "course.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>minigrpo: what you solved</title>\n<style>\n{css}{STYLE}</style>\n</head>\n"
        + "\n".join(['<body>\n<main id="main">', *parts, "</main>\n</body>\n</html>\n"])
    )


def section(result: Result, titles: dict[str, str]) -> str:
    """One notebook: whether it ran to its end, and its exercises."""
    ran = f"Ran to its end in {result.seconds or 0:.0f} seconds."
    if result.seconds is None:
        ran = '<span class="not passed">Did not run to its end.</span>'
    elif result.errors:
        ran += ' <span class="not passed">Some cells raised an error.</span>'
    errors = "".join(f"<pre>{html.escape(error)}</pre>" for error in result.errors)
    rows = []
    for key in result.keys:
        status, name = result.status(key), html.escape(titles.get(key, ""))
        said = html.escape(result.said[key]) if status == "not passed" else ""
        mark = f'<span class="{status}">{MARKS[status]} {status}</span>'
        rows.append((key, f"{name}<pre>{said}</pre>" if said else name, mark))
    name = html.escape(f"{result.notebook.number} {result.notebook.title}")
    return f"<h2>{name}</h2><p>{ran}</p>{errors}{table(('exercise', '', 'result'), rows)}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """The cells are HTML already."""
    lines = ["".join(f'<th scope="col">{name}</th>' for name in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


# ---------------------------------------------------------------------------------------------


def exam(chosen: list[Notebook], out: Path, timeout: float) -> None:
    """Run the notebooks with a copy of what is remembered, and write the page."""
    remembered = kept.recall("exercises")
    known = {section: kept.recall(section) for section in ("predictions", "clinic")}
    left_out = [notebook for notebook in chosen if missing(notebook.needs)]
    todo = {
        notebook: (Result(notebook), with_answers(read(notebook.location), remembered))
        for notebook in chosen
        if notebook not in left_out
    }
    at_a_time = min(AT_A_TIME, len(todo))
    before = os.environ.get("MINIGRPO_PROGRESS")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINIGRPO_PROGRESS"] = str(Path(folder, "progress"))
        try:
            for name, values in known.items():
                for key, value in values.items():
                    kept.remember(name, key, value)
            asyncio.run(each([*todo], lambda n: examine(*todo[n], timeout, at_a_time), at_a_time))
            from minigrpo.exercises import all_exercises  # loads torch, which is slow

            titles = {exercise.key: exercise.title for exercise in all_exercises()}
            results = [result for result, _ in todo.values()]
            write(out / "index.html", page(results, left_out, titles))
        finally:
            del os.environ["MINIGRPO_PROGRESS"]
            os.environ.update({} if before is None else {"MINIGRPO_PROGRESS": before})
    print(f"{counted(results)}; read on: {out / 'index.html'}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status, which is 0 whatever was solved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NUMBER", help="one notebook, such as 02")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per cell (600)")
    parser.add_argument("--root", type=Path, default=ROOT, help="another course")
    options = parser.parse_args(arguments)
    root = options.root.resolve()

    def act() -> None:
        exam(choose(root, options.only, scale=True), root / "build" / "exam", options.timeout)

    return status_of(act)


if __name__ == "__main__":
    sys.exit(main())
