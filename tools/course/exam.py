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
MARKS = {"passed": "✓", "not passed": "✗", "not attempted": "–"}
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>minigrpo: what you solved</title>
<style>
{css}#main {{ margin: 2rem auto; padding: 0 1rem; }} pre {{ white-space: pre-wrap; }}
.passed {{ color: var(--string); }} .not.passed {{ color: var(--wrong); }}
</style>
</head>
<body>
<main id="main">
<h1>minigrpo: what you solved</h1>
<p>{today:%B %d, %Y}: <strong>{solved}</strong></p>
{body}
</main>
</body>
</html>
"""


def with_answers(nb: NotebookNode, remembered: dict[str, dict]) -> NotebookNode:
    """Put the remembered answers in the place of the stubs that are still empty."""
    for key, _, cells in exercises(nb):
        answer = remembered.get(key, {}).get("source")
        if answer and cells and STUB.search(source(cells[-1])):
            cells[-1]["source"] = answer
    return nb


class Examined:
    """What becomes of one notebook."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        number = notebook.number.lstrip("0")
        self.keys = [f"{number}.{place + 1}" for place in range(notebook.exercises)]
        self.said: dict[str, str] = {}  # by its checks
        self.errors: list[str] = []  # of cells that are no checks
        self.end = "did not run to its end"

    async def run(self, remembered: dict[str, dict], timeout: float, at_a_time: int) -> str:
        """Run every cell, whatever the ones before it did; returns what is to be printed."""
        nb = with_answers(read(self.notebook.location), remembered)
        for cell in nb.cells:
            cell.update({"outputs": []} if cell.cell_type == "code" else {})

        async def failed(client: NotebookClient, index: int, error: CellExecutionError) -> None:
            first, check = told(error)[0].splitlines()[0], CHECK.search(nb.cells[index].source)
            if not check:
                self.errors.append(f"{place(nb, index)}: {first}")
                return
            self.said[check[1]] = first  # there is no such function: its cell has an error
            reference = REFERENCE.format(key=check[1], name=check[2])
            await client.async_execute_cell(nbformat.v4.new_code_cell(reference), index)

        began = time.perf_counter()
        try:
            await execute(self.notebook, nb, timeout, environment(at_a_time), failed)
            self.end = f"ran to its end in {time.perf_counter() - began:.0f} s"
        except CourseError as error:
            self.errors.append(str(error).splitlines()[0])
        for cell in nb.cells:
            printed = "".join(output.get("text", "") for output in cell.get("outputs", []))
            if printed and (check := CHECK.search(cell.source)):
                self.said[check[1]] = printed
        return counted([self])

    def status(self, key: str) -> str:
        """Of an exercise: passed, not passed or not attempted."""
        said = self.said.get(key, NOT_ATTEMPTED)
        if NOT_ATTEMPTED in said:
            return "not attempted"
        return "passed" if "): passed," in said.partition("\n")[0] else "not passed"

    def section(self) -> str:
        """On the page: each exercise, and what the checks and other cells complained about."""
        title = html.escape(f"{self.notebook.number} {self.notebook.title}")
        lines = [f"<h2>{title}</h2>", f"<p>{counted([self])}; the notebook {self.end}</p>"]
        lines += [f"<pre>{html.escape(error)}</pre>" for error in self.errors]
        for key in self.keys:
            status = self.status(key)
            lines.append(f'<p class="{status}">{MARKS[status]} {key} {status}</p>')
            if status == "not passed":
                lines.append(f"<pre>{html.escape(self.said[key])}</pre>")
        return "\n".join(lines)


def counted(examined: list[Examined]) -> str:
    """Such as "2 of 6 exercises passed"."""
    states = [one.status(key) for one in examined for key in one.keys]
    return f"{states.count('passed')} of {len(states)} exercises passed"


def page(examined: list[Examined], left_out: list[Notebook]) -> str:
    """What was solved, guessed and diagnosed, in the style of the other pages."""
    parts = [one.section() for one in examined]
    parts += [f"<p>{n.title}: not run, {n.needs} isn't installed</p>" for n in left_out]
    drawn = progress.Progress()
    parts += ["<h2>Predictions and diagnoses</h2>"]
    for key, guess, value in drawn.guesses:
        parts.append(f"<p>{html.escape(key)}: you guessed {guess}, came out at {value or '?'}</p>")
    parts.append(f"<p>{html.escape(drawn.clinic)}</p>")
    css, body = (WEB / "course.css").read_text(encoding="utf-8"), "\n".join(parts)
    return PAGE.format(css=css, today=date.today(), solved=counted(examined), body=body)


def exam(chosen: list[Notebook], out: Path, timeout: float) -> None:
    """Run the notebooks with a copy of what is remembered, and write the page."""
    remembered = kept.recall("exercises")
    known = {section: kept.recall(section) for section in ("predictions", "clinic")}
    left_out = [notebook for notebook in chosen if missing(notebook.needs)]
    todo = {n.stem: Examined(n) for n in chosen if n not in left_out}
    at_a_time = min(AT_A_TIME, len(todo))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINIGRPO_PROGRESS"] = str(Path(folder, "progress"))
        for section, values in known.items():
            for key, value in values.items():
                kept.remember(section, key, value)

        async def act(notebook: Notebook) -> str:
            return await todo[notebook.stem].run(remembered, timeout, at_a_time)

        if todo:
            asyncio.run(each([one.notebook for one in todo.values()], act, at_a_time))
        write(out / "index.html", page([*todo.values()], left_out))
    print(f"{counted([*todo.values()])}; read on: {out / 'index.html'}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status, which is 0 whatever was solved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NUMBER", help="one notebook, such as 02")
    parser.add_argument("--root", type=Path, default=ROOT, help="another course")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    out = root / "build" / "exam"
    return status_of(lambda: exam(choose(root, options.only, scale=True), out, timeout=600))


if __name__ == "__main__":
    sys.exit(main())
