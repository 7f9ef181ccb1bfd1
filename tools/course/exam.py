"""Run the whole course with your answers, and write down what you solved.

    python tools/course/exam.py [--only 02]    make exam: build/exam/index.html

Your notebooks are read and left as they are. Where a stub is still empty, your last answer that
passed is put in its place. What a check says is written down, and where you have no answer that
passes, the notebook goes on with the course's version. Your progress is read and left alone, and
nothing leaves this machine.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from datetime import date
from html import escape
from pathlib import Path

from committed import CourseError, read, write
from course import choose, missing
from kernels import AT_A_TIME, each, environment, execute, place, status_of
from listing import ROOT, Notebook
from nbformat import NotebookNode
from update import CHECK, STUB, exercises, source

from minigrpo.notebook import kept, progress

MARKS = {"passed": "✓", "not passed": "✗", "not attempted": "–"}
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>minigrpo: what you solved</title>
<style>
:root {{ color-scheme: light dark; }}
main {{ max-width: 50rem; margin: 2rem auto; font: 1rem/1.5 sans-serif; }}
pre {{ white-space: pre-wrap; }}
</style>
<main>
<h1>minigrpo: what you solved</h1>
<p>{today:%B %d, %Y}: <strong>{solved}</strong></p>
{body}
</main>
"""


def with_answers(nb: NotebookNode, remembered: dict[str, dict]) -> NotebookNode:
    """Put the remembered answers in the place of the stubs that are still empty.

    Outputs are dropped, and a check finds None where a cell turns out to define no function.
    """
    names = ["line"]
    for key, name, cells in exercises(nb):
        names.append(name)
        answer = remembered.get(key, {}).get("source")
        if answer and cells and STUB.search(source(cells[-1])):
            cells[-1]["source"] = answer
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = []
    code[0].source = f"globals().update(dict.fromkeys({names}))\n{code[0].source}"
    return nb


def heard(nb: NotebookNode, notebook: Notebook) -> tuple[dict[str, str], list[str]]:
    """What the check of each exercise has said, and the errors of the other cells."""
    keys = (f"{notebook.number.lstrip('0')}.{n}" for n in range(1, notebook.exercises + 1))
    said, errors = dict.fromkeys(keys, ""), []
    for index, cell in enumerate(nb.cells):
        check = CHECK.search(cell.source) if cell.cell_type == "code" else None
        for output in cell.get("outputs", []):
            error = output.output_type == "error"
            text = f"{output.ename}: {output.evalue}".splitlines()[0] if error else ""
            if check and check[1] in said:
                shown = output.get("data", {}).get("text/plain", text)
                said[check[1]] += output.get("text", shown)
            elif error and "raises-exception" not in str(cell.metadata):
                errors.append(f"{place(nb, index)}: {text}")
    return said, errors


def status(said: str) -> str:
    """Of an exercise whose check has said this: passed, not passed or not attempted."""
    if not said or "Write yours above" in said:
        return "not attempted"
    return "passed" if "): passed," in said.partition("\n")[0] else "not passed"


def counted(said: dict[str, str]) -> str:
    passed = [key for key in said if status(said[key]) == "passed"]
    return f"{len(passed)} of {len(said)} exercises passed"


def section(notebook: Notebook, said: dict[str, str], errors: list[str]) -> str:
    """A notebook on the page: its exercises, and what checks and other cells complained about."""
    lines = [f"<h2>{escape(f'{notebook.number} {notebook.title}')}</h2>\n<p>{counted(said)}</p>"]
    lines += [f"<pre>{escape(error)}</pre>" for error in errors]
    for key, told in said.items():
        lines.append(f"<p>{MARKS[status(told)]} {key} {status(told)}</p>")
        if status(told) == "not passed":
            lines.append(f"<pre>{escape(told)}</pre>")
    return "\n".join(lines)


def exam(chosen: list[Notebook], out: Path) -> None:
    """Run the notebooks with a copy of what is remembered, and write the page."""
    answers = kept.recall("exercises")
    todo = [notebook for notebook in chosen if not missing(notebook.needs)]
    at_a_time, sections, all_said = min(AT_A_TIME, len(todo)), {}, {}

    async def act(notebook: Notebook) -> str:
        nb, end = with_answers(read(notebook.location), answers), []
        try:
            await execute(notebook, nb, environment(at_a_time), allow_errors=True)
        except CourseError as error:
            end = [f"did not run to its end: {error}".splitlines()[0]]
        said, errors = heard(nb, notebook)
        sections[notebook] = section(notebook, said, errors + end)
        all_said.update(said)
        return counted(said)

    with tempfile.TemporaryDirectory() as folder:
        if kept.path().is_file():
            shutil.copy(kept.path(), Path(folder, "progress.db"))
        os.environ["MINIGRPO_PROGRESS"] = str(Path(folder, "progress.db"))
        if todo:
            asyncio.run(each(todo, act, at_a_time))
        drawn = progress.Progress()
    body = [
        sections.get(n, f"<p>{n.title}: not run, {n.needs} isn't installed</p>") for n in chosen
    ]
    body.append("<h2>Predictions and diagnoses</h2>")
    for key, guess, value in drawn.guesses:
        body.append(f"<p>{escape(key)}: you guessed {guess}, came out at {value or '?'}</p>")
    body.append(f"<p>{escape(drawn.clinic)}</p>")
    page = PAGE.format(today=date.today(), solved=counted(all_said), body="\n".join(body))
    write(out / "index.html", page)
    print(f"{counted(all_said)}; read on: {out / 'index.html'}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status, which is 0 whatever was solved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NUMBER", help="one notebook, such as 02")
    parser.add_argument("--root", type=Path, default=ROOT, help="another course")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    return status_of(lambda: exam(choose(root, options.only, scale=True), root / "build" / "exam"))


if __name__ == "__main__":
    sys.exit(main())
