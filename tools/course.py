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
import copy
import html
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote

import nbformat
from formulas import with_pictures
from jinja2 import DictLoader
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {"09_scaling_out": "trl"}
"""Notebooks that need a library of the extra `scale`, and which."""
GLOSSARY = "GLOSSARY.md"
"""In the folder above the notebooks; it gets a page too."""
TRACEBACK_LINES = 12  # of a failure, the last ones: they name the line and the error
AT_A_TIME = min(2, os.cpu_count() or 1)
"""Notebooks that `run` has going: with a core each they are done sooner than one with all cores."""

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
OVERWRITTEN = re.compile(r"^.*\r(?=[^\n])", re.MULTILINE)  # what nbval drops too
LINK = re.compile(r"""(?P<head>\b(?:href|src)=")(?P<path>[^"#?:]+)(?P<anchor>#[^"]*)?(?=")""")

Progress = Callable[[int, int], None]  # called with (number of the code cell, how many there are)


class CourseError(Exception):
    """What went wrong, as the reader is told it."""


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
    chosen = [path for path in every if _number(path.stem) == _number(only)]
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


def _number(name: str) -> str:
    """ "02_sequence_probability", "02" and "2" -> "2"."""
    return name.split("_")[0].lstrip("0")


def read(path: Path) -> NotebookNode:
    """Read a notebook whose cells have ids: nbformat would make up others at each reading."""
    try:
        nb = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    except Exception as error:  # JSON, encoding, schema: nbformat raises them all as they come
        raise CourseError(f"{path.name} cannot be read: {error}") from error
    if (nb.nbformat, nb.nbformat_minor) < (4, 5):
        raise CourseError(f"{path.name} is older than notebook format 4.5, which has cell ids")
    return nb


def kernel_environment(at_a_time: int = 1) -> dict[str, str]:
    """The environment of a kernel: imports minigrpo from any folder, draws figures inline.

    One of several kernels gets a single thread, unless the user has set the number.
    """
    alone = {} if at_a_time == 1 else {"MINIGRPO_THREADS": "1"}
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **alone,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }


async def execute(
    path: Path, timeout: float, progress: Progress, at_a_time: int = 1
) -> NotebookNode:
    """Execute the notebook at `path` in a fresh kernel, in its own folder.

    Args:
        path: the notebook; the file is left as it is.
        timeout: seconds that one cell may take.
        progress: called before each code cell.
        at_a_time: how many notebooks are being executed.

    Returns:
        The executed notebook, in the form it is committed in.

    Raises:
        CourseError: names the notebook, the cell and the error.
    """
    nb = read(path)
    numbers = {
        index: number
        for number, index in enumerate(
            (i for i, cell in enumerate(nb.cells) if cell.cell_type == "code"), start=1
        )
    }
    at: tuple[int, NotebookNode] | None = None

    def starting(cell: NotebookNode, cell_index: int) -> None:
        nonlocal at
        if cell_index in numbers:
            at = numbers[cell_index], cell
            progress(numbers[cell_index], len(numbers))

    client = NotebookClient(
        nb,
        kernel_name="python3",
        timeout=timeout,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=starting,
        shutdown_kernel="immediate",  # one that is busy would be waited for
    )
    # The log of the kernel process: its advice would break the lines of progress.
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    try:
        await client.async_execute(env=kernel_environment(at_a_time), stderr=log)
    except CellExecutionError as error:
        # nbclient puts the cell's source and output first, and a line of dashes after them.
        traceback = ANSI.sub("", error.traceback).rstrip().rpartition("-" * 18 + "\n")[2]
        lines = traceback.splitlines()[-TRACEBACK_LINES:]
        what = "\n".join([ANSI.sub("", f"{error.ename}: {error.evalue}"), *lines])
        raise _failure(path, at, what) from error
    except CellTimeoutError as error:
        raise _failure(path, at, f"TimeoutError: no end after {timeout:g} seconds") from error
    except DeadKernelError as error:
        what = "DeadKernelError: the kernel died (out of memory, or interrupted?)"
        raise _failure(path, at, "\n".join([what, *_last_lines(log)])) from error
    except AssertionError as error:
        # After Ctrl-C nbclient shuts a kernel down twice, and stumbles the second time.
        raise KeyboardInterrupt from error
    except (RuntimeError, OSError) as error:
        what = f"{type(error).__name__}: {error}"
        raise _failure(path, at, "\n".join([what, *_last_lines(log)])) from error
    finally:
        log.close()
    return committed_form(nb)


def _last_lines(log: TextIO) -> list[str]:
    log.seek(0)
    return log.read().splitlines()[-TRACEBACK_LINES:]


def _failure(path: Path, at: tuple[int, NotebookNode] | None, what: str) -> CourseError:
    where = f"code cell {at[0]} (id {at[1].id})" if at else "before its first code cell"
    return CourseError(f"{path.name}, {where}: {what}")


# ---------------------------------------------------------------------------------------------
# the committed form


def committed_form(nb: NotebookNode) -> NotebookNode:
    """Reduce an executed notebook, in place, to what does not change from run to run."""
    nb.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        }
    )
    for cell in nb.cells:
        kept = {key: cell.metadata[key] for key in ("jupyter", "tags") if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type == "code":
            cell.outputs = merge_streams(cell.outputs)
    return nb


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join neighbouring pieces of one stream, and keep what a carriage return left visible.

    Where the kernel cuts a stream depends on timing. nbval joins the pieces before it compares,
    too, so that the stored output and a new one agree.
    """
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    for output in merged:
        if output.output_type == "stream":
            output.text = OVERWRITTEN.sub("", output.text)
    return merged


def uncommittable(nb: NotebookNode) -> list[str]:
    """What forbids committing an executed notebook: one sentence per finding."""
    findings = []
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        where = f"code cell {number} (id {cell.id})"
        if cell.execution_count != number:
            findings.append(f"{where} was not executed (is it empty, or tagged to be skipped?)")
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                findings.append(f"{where} wrote to stderr: {output.text.strip()[:300]}")
            if output.output_type == "error" and "raises-exception" not in cell.metadata.get(
                "tags", []
            ):
                findings.append(f"{where} raised {output.ename}: {output.evalue}")
            if any("widget" in kind for kind in output.get("data", {})):
                findings.append(f"{where} shows a widget, which a stored notebook cannot")
    return findings


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def as_json(nb: NotebookNode) -> str:
    """The text of a notebook file: sorted keys, indent 1, one line break at the end."""
    return nbformat.writes(nb).rstrip("\n") + "\n"


# ---------------------------------------------------------------------------------------------
# pages


# The page loads nothing from anywhere. It is laid out for telephones too, where only wide tables,
# code and outputs scroll, each in itself; and it stays light where the reader's screen is dark.
TEMPLATE = """{% extends "lab/index.html.j2" %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_css %}
<style>
:root { color-scheme: light; }
body.jp-Notebook { margin: 0 auto; max-width: 66em; padding: 0 1em; overflow: visible; }
.jp-RenderedHTMLCommon { overflow-wrap: break-word; }
.jp-RenderedHTMLCommon table { display: block; max-width: 100%; overflow-x: auto; }
.jp-RenderedHTMLCommon img, .jp-RenderedImage img { max-width: 100%; height: auto; }
.jp-RenderedText pre, .jp-InputArea-editor pre { overflow-x: auto; }
svg[role="img"] { max-width: 100%; overflow: visible; }
.formula { display: block; margin: 0.8em 0; text-align: center; }
@media (max-width: 40em) { .jp-InputPrompt, .jp-OutputPrompt { display: none; } }
</style>
{% endblock %}
"""


def title_of(nb: NotebookNode, default: str) -> str:
    """The first heading of a notebook."""
    for cell in nb.cells:
        heading = re.search(r"^# +(.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            return re.sub(r"[`*]", "", heading[1]).strip()
    return default


def caption(cell: NotebookNode | None) -> str:
    """The paragraph of a markdown cell that says what the figure beside it shows, or ""."""
    text = cell.source if cell and cell.cell_type == "markdown" else ""
    found = re.search(r"\*?Figure: (.+?)\*?(?:\n\n|$)", text, re.DOTALL)
    return " ".join(re.sub(r"[`*$]", "", found[1]).split()) if found else ""


def page(nb: NotebookNode, path: Path, out: Path) -> str:
    """The HTML page of an executed notebook, to be written to the folder `out`.

    Links to the other notebooks lead to their pages, links to other files still to those files.
    """
    name = title_of(nb, path.stem)
    nb = copy.deepcopy(nb)
    for before, cell, after in zip([None, *nb.cells], nb.cells, [*nb.cells[1:], None]):
        if cell.cell_type == "code":
            cell.metadata["alt"] = caption(after) or caption(before)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = with_pictures(cell.source)
    exporter = HTMLExporter(
        template_name="lab",
        template_file="course.html.j2",
        extra_loaders=[DictLoader({"course.html.j2": TEMPLATE})],
    )
    text, _ = exporter.from_notebook_node(nb, resources={"metadata": {"name": name}})

    def moved(link: re.Match[str]) -> str:
        target = path.parent / unquote(html.unescape(link["path"]))
        if not target.exists():
            return link[0]
        if target.name == GLOSSARY:
            new = "glossary.html"
        elif target.parent.resolve() == path.parent.resolve() and target.suffix == ".ipynb":
            new = f"{target.stem}.html"
        else:
            new = Path(os.path.relpath(target, out)).as_posix()
        return f"{link['head']}{new}{link['anchor'] or ''}"

    return LINK.sub(moved, text)


def write_page(nb: NotebookNode, path: Path, out: Path, seconds: float) -> None:
    """Write the executed notebook and its page to the folder `out`."""
    nb.metadata["minigrpo"] = {"seconds": round(seconds, 1)}
    write(out / path.name, as_json(nb))
    write(out / f"{path.stem}.html", page(nb, path, out))


def remove_page(path: Path, out: Path) -> None:
    """Remove the page of a notebook and its executed copy."""
    for suffix in (".html", ".ipynb"):
        (out / f"{path.stem}{suffix}").unlink(missing_ok=True)


def remove_stale(folder: Path, out: Path) -> None:
    """Remove the pages of notebooks that have changed since, or are gone."""
    for built in sorted({file.stem for file in out.glob("*.*")} - {"index", "glossary"}):
        source, executed = folder / f"{built}.ipynb", out / f"{built}.ipynb"
        complete = source.exists() and executed.exists() and (out / f"{built}.html").exists()
        if not complete or _sources(source) != _sources(executed):
            remove_page(source, out)


def _sources(path: Path) -> list[str]:
    return [cell.source for cell in read(path).cells]


def write_index(folder: Path, out: Path) -> None:
    """Write index.html: the notebooks in order, with a link to each page there is.

    The glossary, if there is one, gets its page here too.
    """
    items = []
    for path in choose(folder, scale=True):
        executed = out / path.name
        if executed.exists():
            nb = read(executed)
            link = f'<a href="{path.stem}.html">{html.escape(title_of(nb, path.stem))}</a>'
            items.append(f"<li>{link} ({nb.metadata.minigrpo.seconds:.0f} s)</li>")
        else:
            name = html.escape(title_of(read(path), path.stem))
            why = "; needs make course SCALE=1" if path.stem in NEEDS else ""
            items.append(f"<li>{name} (not executed yet{why})</li>")
    glossary = folder.parent / GLOSSARY
    if glossary.is_file():
        text = nbformat.v4.new_markdown_cell(glossary.read_text(encoding="utf-8"))
        write(out / "glossary.html", page(nbformat.v4.new_notebook(cells=[text]), glossary, out))
        items.append('<li><a href="glossary.html">Symbols and glossary</a></li>')
    write(
        out / "index.html",
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>minigrpo</title>\n"
        "<style>body { font: 1.1em/1.6 sans-serif; margin: 3em auto; max-width: 40em; }</style>\n"
        "</head>\n<body>\n<h1>minigrpo</h1>\n<ul>\n" + "\n".join(items) + "\n</ul>\n"
        "</body>\n</html>\n",
    )


# ---------------------------------------------------------------------------------------------
# the two commands


class Board:
    """A line per notebook when it has ended; on a terminal also one of what is going on."""

    def __init__(self) -> None:
        self.going: dict[str, str] = {}
        self.live = sys.stdout.isatty()

    def update(self, name: str, cell: int, cells: int) -> None:
        """Say how far a notebook is."""
        self.going[name] = f"{name} {cell}/{cells}"
        if self.live:
            print("\r\x1b[K" + "   ".join(self.going.values()), end="", flush=True)

    def end(self, name: str, line: str) -> None:
        """Say what became of it."""
        self.going.pop(name, None)
        if self.live:
            print("\r\x1b[K", end="")
        print(line, flush=True)


async def each(
    paths: list[Path],
    timeout: float,
    done: Callable[[NotebookNode, Path, float], None],
    at_a_time: int = 1,
) -> None:
    """Execute notebooks in order and hand each to `done`; at the first failure all stop."""
    # asyncio would print the whole traceback of a Ctrl-C; failures come out of gather.
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    board, waiting = Board(), iter(enumerate(paths, start=1))
    at_a_time = min(at_a_time, len(paths))

    async def one_after_the_other() -> None:
        for number, path in waiting:  # which is shared: each takes what nobody has taken
            head, began = f"[{number}/{len(paths)}] {path.stem}", time.perf_counter()
            try:
                progress = partial(board.update, path.stem)
                nb = await execute(path, timeout, progress, at_a_time)
                seconds = time.perf_counter() - began
                done(nb, path, seconds)
            except BaseException:
                seconds = time.perf_counter() - began
                board.end(path.stem, f"{head}: stopped after {seconds:.1f} s")
                raise
            cells = sum(cell.cell_type == "code" for cell in nb.cells)
            board.end(path.stem, f"{head}: {cells} cells in {seconds:.1f} s")

    tasks = [asyncio.create_task(one_after_the_other()) for _ in range(at_a_time)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # one that has ended does not mind
        await asyncio.gather(*tasks, return_exceptions=True)  # until their kernels are gone


def run(paths: list[Path], out: Path, timeout: float) -> None:
    """Execute notebooks and write their pages; afterwards there is no page that is out of date."""
    folder = paths[0].parent
    out.mkdir(parents=True, exist_ok=True)
    remove_stale(folder, out)
    for path in paths:
        remove_page(path, out)
    write_index(folder, out)

    def done(nb: NotebookNode, path: Path, seconds: float) -> None:
        write_page(nb, path, out, seconds)
        write_index(folder, out)

    began = time.perf_counter()
    asyncio.run(each(paths, timeout, done, AT_A_TIME))
    print(f"{time.perf_counter() - began:.0f} s in all; read on: {out / 'index.html'}")


def execute_in_place(paths: list[Path], timeout: float) -> None:
    """Execute notebooks and store their outputs; a notebook not fit for that is left untouched."""

    def done(nb: NotebookNode, path: Path, seconds: float) -> None:
        findings = uncommittable(nb)
        if findings:
            raise CourseError(f"{path.name} is left as it was: " + "\n  ".join(findings))
        write(path, as_json(nb))

    asyncio.run(each(paths, timeout, done))


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
    try:
        paths = choose(options.notebooks.resolve(), options.only, options.scale)
        check_installed(paths)
        if options.command == "run":
            run(paths, options.out.resolve(), options.timeout)
        else:
            execute_in_place(paths, options.timeout)
    except CourseError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
