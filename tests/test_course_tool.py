"""tools/course.py on tiny notebooks: what it writes, what it says, and what it leaves alone."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import committed
import course
import nbformat
import pytest
import solutions
from nbformat import NotebookNode

FIGURE = """import matplotlib.pyplot as plt

plt.plot([0, 1])
plt.show()"""


def notebook(*sources: str, title: str = "A title", tags: tuple[str, ...] = ()) -> NotebookNode:
    """A notebook with these code cells; `tags` are those of the last one."""
    v4 = nbformat.v4
    cells = [v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources, start=1)]
    cells[-1].metadata["tags"] = list(tags)
    links = "[two](02_two.ipynb#here) [readme](../README.md) [away](https://example.org/x.ipynb)"
    nb = v4.new_notebook(cells=[v4.new_markdown_cell(f"# {title}\n\n{links}", id="top"), *cells])
    nb.nbformat_minor = 5
    return nb


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A course of two notebooks, in a checkout that has a README."""
    (tmp_path / "README.md").touch()
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook("x = 1", "x"), tmp_path / "notebooks" / "01_one.ipynb")
    nbformat.write(notebook("2", title="Second"), tmp_path / "notebooks" / "02_two.ipynb")
    return tmp_path / "notebooks"


def call(command: str, folder: Path, *options: str) -> int:
    """The exit status of the command line, on the notebooks of `folder`."""
    out = folder.parent / "build"
    return course.main([command, "--notebooks", str(folder), "--out", str(out), *options])


def files(out: Path) -> list[str]:
    """The names in a folder, none if it is not there."""
    return sorted(path.name for path in out.glob("*")) if out.exists() else []


# ---------------------------------------------------------------------------------------------
# without a kernel


def test_choose_takes_all_in_order_or_one(folder):
    names = [path.stem for path in course.choose(folder)]
    assert names == ["01_one", "02_two"]
    assert [p.stem for p in course.choose(folder, "02")] == ["02_two"]
    assert [p.stem for p in course.choose(folder, "2")] == ["02_two"]


def test_a_notebook_that_needs_more_is_taken_when_asked_for(folder, monkeypatch):
    monkeypatch.setattr(course, "NEEDS", {"02_two": "no_such_library"})
    names = [path.stem for path in course.choose(folder)]
    assert names == ["01_one"]
    assert [p.stem for p in course.choose(folder, scale=True)] == ["01_one", "02_two"]
    assert [p.stem for p in course.choose(folder, "02")] == ["02_two"]


@pytest.mark.parametrize("options", [("--scale",), ("--only", "02")])
def test_what_it_needs_is_looked_for_before_anything_runs(folder, capsys, monkeypatch, options):
    monkeypatch.setattr(course, "NEEDS", {"02_two": "no_such_library"})
    assert call("run", folder, *options) == 1
    printed = capsys.readouterr()
    assert "02_two needs no_such_library" in printed.err and "SCALE=1" in printed.err
    assert "01_one" not in printed.out
    assert course.lacks(folder / "01_one.ipynb") is None
    monkeypatch.setattr(course, "NEEDS", {"02_two": "pytest"})
    assert course.lacks(folder / "02_two.ipynb") is None


def test_the_notebooks_that_need_more_or_take_long_are_there():
    there = {path.stem for path in (course.ROOT / "notebooks").glob("*.ipynb")}
    assert {*course.NEEDS, *course.LONGEST} <= there


@pytest.mark.parametrize(
    ("at_a_time", "order"),
    [(1, ["02_two", "07_grpo", "01_char_gpt"]), (2, ["01_char_gpt", "07_grpo", "02_two"])],
)
def test_where_two_go_at_a_time_the_longest_begin(monkeypatch, at_a_time, order):
    begun = []

    async def execute(path, *ignored):
        begun.append(path.stem)
        return notebook("1")

    monkeypatch.setattr(course, "execute", execute)
    paths = [Path(f"{name}.ipynb") for name in ("02_two", "07_grpo", "01_char_gpt")]
    asyncio.run(course.each(paths, 1, lambda *ignored: None, at_a_time))
    assert begun == order


def test_the_glossary_gets_a_page(folder, tmp_path):
    (folder.parent / "GLOSSARY.md").write_text("# Words\n\n| $q$ | prompt |\n|---|---|\n")
    out = tmp_path / "out"
    out.mkdir()
    course.write_index(folder, out)
    assert "glossary.html" in (out / "index.html").read_text()
    page = (out / "glossary.html").read_text()
    assert "<mi>q</mi>" in page and "<title>Words · minigrpo</title>" in page
    course.remove_stale(folder, out)
    assert files(out) == ["course.js", "glossary.html", "index.html"]


@pytest.mark.parametrize("command", ["run", "execute"])
def test_unknown_number_lists_what_there_is(folder, capsys, command):
    assert call(command, folder, "--only", "07") == 1
    assert "no notebook '07'; there are: 01_one, 02_two" in capsys.readouterr().err


def test_no_notebook_is_an_error(tmp_path, capsys):
    assert call("run", tmp_path) == 1
    assert "there is no notebook in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{", '{"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": []}']
)
def test_unreadable_notebook_is_named(folder, capsys, text):
    (folder / "01_one.ipynb").write_text(text)
    assert call("execute", folder) == 1
    assert "01_one.ipynb" in capsys.readouterr().err


def test_streams_are_merged_as_nbval_merges_them():
    nbval = pytest.importorskip("nbval.plugin")
    cut = ["a\n1%", "\r20%", "\r100%\nb\r\n"]
    pieces = [*(("stdout", text) for text in cut), ("stderr", "w")]

    def outputs() -> list[NotebookNode]:
        return [nbformat.v4.new_output("stream", name=n, text=text) for n, text in pieces]

    merged = committed.merge_streams(outputs())
    assert [(o.name, o.text) for o in merged] == [("stdout", "a\n100%\nb\r\n"), ("stderr", "w")]
    assert merged == nbval.coalesce_streams(outputs())
    assert committed.merge_streams(merged) == merged


def test_text_around_a_figure_keeps_its_place():
    v4 = nbformat.v4
    outputs = [
        v4.new_output("stream", text="before\n"),
        v4.new_output("display_data", data={"text/plain": "figure"}),
        v4.new_output("stream", text="after\n"),
    ]
    assert committed.merge_streams(outputs) == outputs


def test_committed_form_drops_times_versions_and_editors():
    nb = notebook("1", tags=("verdict",))
    nb.metadata.update(language_info={"name": "python", "version": "3.11.7"}, widgets={}, toc={})
    nb.cells[1].metadata.update(execution={"t": "2026"}, vscode={}, alt="a line")
    nb.cells[0].metadata.update(alt="a title")
    committed.committed_form(nb)
    assert nb.metadata.language_info == {"name": "python"}
    assert nb.metadata.kernelspec.display_name == "Python 3 (ipykernel)"
    assert set(nb.metadata) == {"kernelspec", "language_info"}
    assert {*nb.cells[1].metadata} == {"alt", "jupyter", "tags"} and nb.cells[0].metadata == {}


@pytest.mark.parametrize(
    ("tags", "folded"),
    [
        (("verdict",), {"source_hidden": True, "outputs_hidden": True}),
        (("nbval-ignore-output", "predict"), {"outputs_hidden": True}),
        (("raises-exception",), None),
        ((), None),
    ],
)
def test_a_cell_is_folded_as_its_tags_say(tags, folded):
    nb = notebook("1", tags=tags)
    nb.cells[1].metadata["jupyter"] = {"source_hidden": True}  # by the editor
    assert committed.committed_form(nb).cells[1].metadata.get("jupyter") == folded


def drawn(alt: str | list[str], *kinds: str) -> NotebookNode:
    """A notebook whose cell has a figure of each kind, behind a printed line."""
    v4 = nbformat.v4
    nb = notebook("plot()")
    nb.cells[1].update(metadata=NotebookNode(alt=alt), execution_count=1)
    nb.cells[1].outputs = [v4.new_output("stream", text="a line\n")]
    size = {"image/png": {"width": 700, "height": 300}}
    for kind in kinds:
        output = v4.new_output("display_data", data={kind: "", "text/plain": ""}, metadata=size)
        nb.cells[1].outputs.append(nbformat.from_dict(output))
    return nb


def test_each_figure_gets_its_description_and_keeps_its_size():
    nb = committed.committed_form(drawn(["falls", "rises"], "image/png", "image/svg+xml"))
    text, falls, rises = (output.get("metadata") for output in nb.cells[1].outputs)
    assert text is None and falls["image/png"] == {"alt": "falls", "width": 700, "height": 300}
    assert rises["image/svg+xml"] == {"alt": "rises"}
    assert committed.uncommittable(nb) == []
    nb = committed.committed_form(drawn("falls", "image/png"))
    assert nb.cells[1].outputs[1].metadata["image/png"]["alt"] == "falls"
    nbformat.validate(nb)


@pytest.mark.parametrize("alt", ["falls", ["falls", "rises", "falls"]])
def test_a_description_too_many_or_too_few_is_told(alt):
    (finding,) = committed.uncommittable(drawn(alt, "image/png", "image/png"))
    assert "(id cell-1) has 2 figures, and describes" in finding


def test_failed_write_leaves_the_file(tmp_path):
    path = tmp_path / "page.html"
    committed.write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        committed.write(path, "new\ud800")
    assert path.read_text() == "old"
    assert files(tmp_path) == ["page.html"]


# ---------------------------------------------------------------------------------------------
# with kernels


@pytest.mark.kernel
def test_run_writes_pages_and_an_index(folder, capsys, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")  # would leave the notebook without its figure
    monkeypatch.setattr(course, "AT_A_TIME", 1)  # with two, 02 might be done when 01 fails
    nbformat.write(
        notebook("import minigrpo\n\nfile = open('../README.md')", FIGURE, title="A & B"),
        folder / "01_one.ipynb",
    )
    before = (folder / "01_one.ipynb").read_bytes()
    out = folder.parent / "build"
    out.mkdir()
    (out / "09_gone.html").touch()

    assert call("run", folder) == 0

    said = capsys.readouterr().out
    assert re.search(r"^\[1/2\] 01_one: 2 cells in \d+\.\d s$", said, re.MULTILINE)
    assert re.search(r"^\[2/2\] 02_two: 1 cells in \d+\.\d s$", said, re.MULTILINE)
    assert re.search(r"^\d+ s in all; read on: .*index\.html$", said, re.MULTILINE)
    names = ["01_one.html", "01_one.ipynb", "02_two.html", "02_two.ipynb"]
    assert files(out) == [*names, "course.js", "index.html"]
    html = (out / "01_one.html").read_text(encoding="utf-8")
    assert 'href="02_two.html#here"' in html
    assert 'href="../README.md"' in html
    assert 'href="https://example.org/x.ipynb"' in html
    executed = nbformat.read(out / "01_one.ipynb", as_version=nbformat.NO_CONVERT)
    assert executed.cells[2].outputs[0].data["image/png"] in html
    index = (out / "index.html").read_text(encoding="utf-8")
    for link in ('<a href="01_one.html">A &amp; B</a>', '<a href="02_two.html">Second</a>'):
        assert re.search(rf"{link}</h3>\n.*executed in \d+ s", index)
    assert (folder / "01_one.ipynb").read_bytes() == before

    # A notebook that has changed since loses its page when another one is run.
    nbformat.write(notebook("3", title="Changed"), folder / "02_two.ipynb")
    assert call("run", folder, "--only", "01") == 0
    assert files(out) == ["01_one.html", "01_one.ipynb", "course.js", "index.html"]
    assert re.search("<h3>Changed</h3>\n.*>not executed yet<", (out / "index.html").read_text())
    assert 'href="index.html#02_two"' in (out / "01_one.html").read_text()  # there is no page
    monkeypatch.setattr(course, "NEEDS", {"02_two": "pytest"})
    course.write_index(folder, out)
    needs = ">not executed yet; needs make course SCALE=1<"
    assert needs in (out / "index.html").read_text()

    # So does one that fails, although it has not changed; what comes after it is not run.
    (folder.parent / "README.md").unlink()
    assert call("run", folder) == 1
    assert files(out) == ["course.js", "index.html"]
    assert '"01_one.html"' not in (out / "index.html").read_text()


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        ("def f():\n    return {}['key']\n\nf()", (), "KeyError: 'key'"),
        ("import os\n\nos._exit(1)", (), "DeadKernelError"),
        ("import time\n\ntime.sleep(60)", ("--timeout", "1"), "TimeoutError: no end after 1 s"),
    ],
)
def test_failure_names_notebook_cell_and_error(folder, capsys, source, options, error):
    nbformat.write(notebook("x = 1", source), folder / "01_one.ipynb")
    before = (folder / "01_one.ipynb").read_bytes()
    assert call("execute", folder, *options) == 1
    printed = capsys.readouterr()
    assert f"FAILED: 01_one.ipynb, code cell 2 (id cell-2): {error}" in printed.err
    assert "\x1b" not in printed.err
    assert "02_two" not in printed.out
    assert (folder / "01_one.ipynb").read_bytes() == before
    assert {"KeyError: 'key'": "return {}['key']"}.get(error, "") in printed.err


@pytest.mark.kernel
def test_execute_is_stable_byte_for_byte(folder):
    flushes = "for i in range(3):\n    print(i, flush=True)"
    nb = notebook("'ä'", flushes, FIGURE, "1 / 0", tags=("raises-exception",))
    nb.cells[2].metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00"}
    path = folder / "01_one.ipynb"
    nbformat.write(nb, path)

    assert call("execute", folder, "--only", "1") == 0
    first = path.read_bytes()
    assert call("execute", folder, "--only", "1") == 0
    assert path.read_bytes() == first

    text = first.decode("utf-8")
    assert "'ä'" in text and text.startswith('{\n "cells"') and text.endswith("}\n")
    stored = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    assert [cell.id for cell in stored.cells] == ["top", "cell-1", "cell-2", "cell-3", "cell-4"]
    assert [cell.execution_count for cell in stored.cells[1:]] == [1, 2, 3, 4]
    assert [cell.metadata for cell in stored.cells[1:4]] == [{}, {}, {}]
    assert [output.text for output in stored.cells[2].outputs] == ["0\n1\n2\n"]
    assert "image/png" in stored.cells[3].outputs[0].data


PASSES = """\
from minigrpo.notebook import kept

before = sorted(kept.recall("clinic"))
kept.remember("clinic", str(len(before)), {"right": True})
print("known before:", before)"""


def known(path: Path) -> str:
    """What the notebook printed that knows of the clinic."""
    return nbformat.read(path, as_version=4).cells[1].outputs[0].text


@pytest.mark.kernel
def test_execute_and_run_know_no_reader(folder, tmp_path, monkeypatch):
    """Nor spend a measurement of the clinic; the notebooks of `execute` don't know each other."""
    own = tmp_path / "own" / "progress.db"
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(own))
    paths = [folder / name for name in ("01_one.ipynb", "02_two.ipynb")]
    for path in paths:
        nbformat.write(notebook(PASSES), path)
    assert call("execute", folder) == 0
    assert [known(path) for path in paths] == ["known before: []\n"] * 2
    for _ in range(2):
        assert call("run", folder, "--only", "1") == 0
        assert known(folder.parent / "build" / "01_one.ipynb") == "known before: []\n"
    assert not own.exists()


@pytest.mark.kernel
def test_the_notebooks_that_are_tested_know_no_reader_either(folder, tmp_path):
    """Nor what the one before has left behind."""
    names = ["01_one.ipynb", "02_two.ipynb"]
    for name in names:
        nbformat.write(notebook(PASSES), folder / name)
    assert call("execute", folder) == 0
    own = tmp_path / "own" / "progress.db"
    options = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "-p", "conftest", "-q"]
    command = [sys.executable, "-m", "pytest", *options, "-c", str(course.ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, f"--rootdir={folder}", *(str(folder / name) for name in names)],
        env={**os.environ, "PYTHONPATH": str(course.ROOT), "MINIGRPO_PROGRESS": str(own)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert not own.exists()


@pytest.mark.kernel
def test_execute_puts_the_solution_below_its_check(folder):
    stub = "from minigrpo.exercises import check\n\n\ndef mine(n):\n    raise NotImplementedError"
    path = folder / "01_one.ipynb"
    nbformat.write(notebook(stub, 'mine = check("1.2", mine)', "mine(2)"), path)
    assert call("execute", folder, "--only", "1") == 0
    first = path.read_bytes()
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.id for cell in cells] == ["top", "cell-1", "cell-2", "solution-1-2", "cell-3"]
    assert cells[3].metadata == {"tags": ["solution"]} and "def causal_mask(" in cells[3].source
    cells[3].source = "an old solution"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert call("execute", folder, "--only", "1") == 0
    assert path.read_bytes() == first


def test_a_solution_says_why_and_begins_no_html(monkeypatch):
    from minigrpo.exercises import reader

    monkeypatch.setattr(reader.find("1.2").reference, "why", "Not a <b>, but `<c>`.")
    source = solutions.solution_cell("1.2").source
    assert source.startswith(
        "<details><summary>Solution (try first)</summary>\n\n```python\nimport"
    )
    assert source.endswith("\n```\n\nNot a \\<b>, but `<c>`.\n\n</details>")


@pytest.mark.kernel
def test_a_figure_is_stored_at_200_dpi_and_shown_at_its_size(folder):
    begin = "from minigrpo.notebook.setup import setup\n\nsetup()"
    path = folder / "01_one.ipynb"
    nb = notebook(begin, FIGURE)
    nb.cells[2].metadata["alt"] = "a line that rises"
    nbformat.write(nb, path)
    assert call("execute", folder, "--only", "1") == 0
    (figure,) = nbformat.read(path, as_version=4).cells[2].outputs
    png, shown = base64.b64decode(figure.data["image/png"]), figure.metadata["image/png"]
    pixels = struct.unpack(">II", png[16:24])
    assert pixels == pytest.approx((2 * shown.width, 2 * shown.height), abs=1)
    assert 680 <= shown.width <= 720 and shown.alt == "a line that rises"
    at = png.index(b"pHYs") + 4
    assert struct.unpack(">I", png[at : at + 4])[0] == pytest.approx(200 / 0.0254, abs=1)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("source", "tags", "finding"),
    [
        ("import sys\n\nprint('careful', file=sys.stderr)", (), "wrote to stderr: careful"),
        ("1", ("skip-execution",), "was not executed"),
    ],
)
def test_execute_leaves_alone_what_is_not_fit(folder, capsys, source, tags, finding):
    nbformat.write(notebook(source, tags=tags), folder / "01_one.ipynb")
    before = (folder / "01_one.ipynb").read_bytes()
    assert call("execute", folder) == 1
    printed = capsys.readouterr()
    assert "01_one.ipynb is left as it was: code cell 1 (id cell-1) " + finding in printed.err
    assert (folder / "01_one.ipynb").read_bytes() == before


@pytest.mark.kernel
def test_run_has_two_going_at_a_time(folder, capsys, monkeypatch):
    wait = """import os
import time

mine, other = {names!r}
open(mine, "w").close()
began = time.time()
while not os.path.exists(other):
    assert time.time() - began < 60, "the other one never began"
assert os.environ["MINIGRPO_THREADS"] == "1\""""
    for name, names in (("01_one", ("one", "two")), ("02_two", ("two", "one"))):
        nbformat.write(notebook(wait.format(names=names)), folder / f"{name}.ipynb")
    monkeypatch.setattr(course, "AT_A_TIME", 2)
    monkeypatch.delenv("MINIGRPO_THREADS", raising=False)
    assert call("run", folder) == 0
    assert capsys.readouterr().out.count("1 cells in") == 2

    # When one fails, the other is stopped; what comes after both never begins.
    nbformat.write(notebook("1 / 0"), folder / "01_one.ipynb")
    nbformat.write(notebook("import time", "time.sleep(100)"), folder / "02_two.ipynb")
    nbformat.write(notebook("1"), folder / "03_three.ipynb")
    began = time.perf_counter()
    assert call("run", folder) == 1
    assert time.perf_counter() - began < 50
    printed = capsys.readouterr()
    assert "FAILED: 01_one.ipynb, code cell 1 (id cell-1): ZeroDivisionError" in printed.err
    assert "[2/3] 02_two: stopped after" in printed.out and "03_three" not in printed.out
    assert files(folder.parent / "build") == ["course.js", "index.html"]


@pytest.mark.kernel
def test_ctrl_c_stops_the_kernels_and_leaves_nothing_half_written(folder):
    source = "import os\nimport time\n\nopen({!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)"
    for name in ("01_one", "02_two"):
        nbformat.write(notebook(source.format(name)), folder / f"{name}.ipynb")
    out = folder.parent / "build"
    command = [sys.executable, course.__file__, "run", "--notebooks", folder, "--out", out]
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    kernels = [folder / "01_one", folder / "02_two"][: course.AT_A_TIME]
    end = time.monotonic() + 60
    while not all(kernel.exists() and kernel.read_text() for kernel in kernels):
        assert time.monotonic() < end and ran.poll() is None, "the kernels do not run"
        time.sleep(0.1)
    ran.send_signal(signal.SIGINT)
    printed, complained = ran.communicate(timeout=30)
    assert ran.returncode == 130 and complained == "interrupted\n"
    assert printed.count("stopped after") == len(kernels)
    assert files(out) == ["course.js", "index.html"]
    assert '"01_one.html"' not in (out / "index.html").read_text()
    for kernel in kernels:
        with pytest.raises(ProcessLookupError):
            os.kill(int(kernel.read_text()), 0)


@pytest.mark.kernel
def test_a_formula_that_cannot_be_converted_is_named(folder, capsys):
    nb = notebook("1")
    nb.cells[0].source = r"# One $\nonsense{x}$"
    nbformat.write(nb, folder / "01_one.ipynb")
    assert call("run", folder, "--only", "01") == 1
    said = r"FAILED: 01_one.ipynb: formula '\\nonsense{x}' cannot be converted: ValueError"
    assert said in capsys.readouterr().err
    assert files(folder.parent / "build") == ["course.js", "index.html"]


def test_one_of_several_kernels_gets_one_thread(monkeypatch):
    monkeypatch.delenv("MINIGRPO_THREADS", raising=False)
    assert "MINIGRPO_THREADS" not in course.kernel_environment()
    assert course.kernel_environment(2)["MINIGRPO_THREADS"] == "1"
    monkeypatch.setenv("MINIGRPO_THREADS", "4")
    assert course.kernel_environment(2)["MINIGRPO_THREADS"] == "4"


def test_kernel_imports_the_package_from_anywhere(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    paths = course.kernel_environment()["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(course.ROOT), "elsewhere"]
