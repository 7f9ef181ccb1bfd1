"""tools/course/course.py on tiny notebooks: what it writes, what it says, what it leaves alone."""

import asyncio
import base64
import copy
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import committed
import course
import kernels
import made_up
import nbformat
import pytest
from made_up import files, notebook
from nbformat import NotebookNode

FIGURE = "import matplotlib.pyplot as plt\n\nplt.plot([0, 1])\nplt.show()"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
LINKS = "[two](02_two.ipynb#here)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course of two notebooks."""
    one, two = notebook("x = 1", "x", text=f"# A & B\n\n{LINKS}"), notebook("2", text="# Second")
    return made_up.course(tmp_path, {"01_one": one, "02_two": two})


def write(root: Path, stem: str, *sources: str, **more: object) -> Path:
    path = root / "notebooks" / f"{stem}.ipynb"
    nbformat.write(notebook(*sources, **more), path)
    return path


def call(command: str, root: Path, *options: str) -> int:
    """The exit status of the command line."""
    return course.main([command, "--root", str(root), *options])


# ---------------------------------------------------------------------------------------------
# without a kernel


def test_all_notebooks_are_chosen_in_order_or_one_or_those_that_need_no_more(root):
    def stems(*options: object) -> list[str]:
        return [chosen.stem for chosen in course.choose(root, *options)]

    assert stems() == ["01_one", "02_two"] and stems("02") == stems("2") == ["02_two"]
    with (root / "course.toml").open("a") as entries:
        entries.write('needs = "no_such_library"\n')
    assert stems() == ["01_one"] and stems("02") == ["02_two"]
    assert stems(None, True) == ["01_one", "02_two"]


@pytest.mark.parametrize("options", [("--scale",), ("--only", "02")])
def test_what_a_notebook_needs_is_looked_for_before_anything_runs(root, capsys, options):
    with (root / "course.toml").open("a") as entries:
        entries.write('needs = "no_such_library"\n')
    assert call("run", root, *options) == 1
    printed = capsys.readouterr()
    assert "02_two needs no_such_library" in printed.err and "SCALE=1" in printed.err
    assert "01_one" not in printed.out and not (root / "build").exists()


def test_an_unknown_number_lists_what_there_is(root, capsys):
    assert call("run", root, "--only", "07") == 1
    assert "no notebook '07'; there are: 01_one, 02_two" in capsys.readouterr().err


OLD = '{"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": []}'


FORMULA = nbformat.writes(notebook(text=r"# One $\nonsense{x}$"))


@pytest.mark.parametrize("text", ["{", OLD, FORMULA])
def test_a_notebook_that_cannot_be_read_or_shown_is_named(root, capsys, text):
    (root / "notebooks" / "01_one.ipynb").write_text(text)
    assert call("run", root) == 1
    assert "FAILED: 01_one.ipynb" in capsys.readouterr().err


@pytest.mark.parametrize(("at_a_time", "order"), [(1, "abc"), (2, "bca")])
def test_where_two_go_at_a_time_the_longest_begin(at_a_time, order):
    begun = []

    async def act(one):
        begun.append(one.stem)
        return "done"

    some = [SimpleNamespace(stem=stem, seconds=s) for stem, s in (("a", 1), ("b", 9), ("c", 5))]
    asyncio.run(kernels.each(some, act, at_a_time))
    assert "".join(begun) == order


def test_streams_are_merged_as_nbval_merges_them():
    nbval, nb = pytest.importorskip("nbval.plugin"), notebook("1")
    cut = ["a\n1%", "\r20%", "\r100%\nb\r\n"]
    pieces = [*(("stdout", text) for text in cut), ("stderr", "w")]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in pieces]
    nb.cells[1].outputs = outputs
    merged = committed.committed_form(copy.deepcopy(nb)).cells[1].outputs
    assert [(o.name, o.text) for o in merged] == [("stdout", "a\n100%\nb\r\n"), ("stderr", "w")]
    assert merged == nbval.coalesce_streams(outputs)


@pytest.mark.parametrize(
    ("tags", "folded"),
    [
        (("nbval-ignore-output", "plot"), {"jupyter": {"source_hidden": True}, "cellView": "form"}),
        (("predict",), {}),
        (("raises-exception",), {}),
    ],
)
def test_the_committed_form_folds_as_tags_say_and_drops_times_versions_and_editors(tags, folded):
    nb = notebook("1", tags=tags)
    nb.metadata.update(language_info={"name": "python", "version": "3.11.7"}, widgets={}, toc={})
    nb.cells[1].metadata.update(execution={"t": "2026"}, jupyter={"source_hidden": True}, alt="x")
    nb.cells[0].metadata.update(alt="a title")
    committed.committed_form(nb)
    assert nb.metadata.language_info == {"name": "python"}
    assert set(nb.metadata) == {"kernelspec", "language_info"}
    assert nb.cells[1].metadata == {"alt": "x", "tags": [*tags], **folded}
    assert nb.cells[0].metadata == {}


def drawn(alt: str | list[str], *kinds: str) -> NotebookNode:
    """A notebook whose cell has a figure of each kind, behind a printed line."""
    v4, nb = nbformat.v4, notebook("plot()")
    nb.cells[1].update(metadata=NotebookNode(alt=alt), execution_count=1)
    nb.cells[1].outputs = [v4.new_output("stream", text="a line\n")]
    size = {"image/png": {"width": 700, "height": 300}}
    for kind in kinds:
        data = {kind: PNG if kind == "image/png" else "", "text/plain": ""}
        output = v4.new_output("display_data", data=data, metadata=size)
        nb.cells[1].outputs.append(nbformat.from_dict(output))
    return committed.committed_form(nb)


@pytest.mark.parametrize("kind", ["image/png", "image/svg+xml"])
def test_a_drawing_is_one_figure_and_both_its_forms_are_described(kind):
    nb = drawn("falls", "image/png")
    nb.cells[1].outputs[1].data["image/svg+xml"] = "<svg/>"
    committed.committed_form(nb)
    assert committed.uncommittable(nb) == []
    assert nb.cells[1].outputs[1].metadata[kind]["alt"] == "falls"


def test_what_answers_a_question_is_stored_apart_and_comes_back(root):
    path, nb = root / "notebooks" / "01_one.ipynb", notebook("print(2)", tags=("predict",))
    output = nbformat.v4.new_output("stream", text="2\n")
    nb.cells[1].update(outputs=[output], execution_count=1)
    course.store(SimpleNamespace(location=path, file=path.name), nb)
    stored = committed.read(path)
    assert stored.cells[1].outputs == [] and "2\\n" in committed.predicted(path).read_text("utf-8")
    assert committed.with_predicted(stored, path).cells[1].outputs[0].text == "2\n"


def test_each_figure_gets_its_description_and_keeps_its_size():
    nb = drawn(["falls", "rises"], "image/png", "image/svg+xml")
    text, falls, rises = (output.get("metadata") for output in nb.cells[1].outputs)
    assert text is None and falls["image/png"] == {"alt": "falls", "width": 700, "height": 300}
    assert rises["image/svg+xml"] == {"alt": "rises"}
    assert committed.uncommittable(nb) == []


@pytest.mark.parametrize("alt", ["falls", ["falls", "rises", "falls"]])
def test_a_description_too_many_or_too_few_is_told(alt):
    (finding,) = committed.uncommittable(drawn(alt, "image/png", "image/png"))
    assert "(id cell-1) has 2 figures, and describes" in finding


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    committed.write(tmp_path / "page.html", "old")
    with pytest.raises(UnicodeEncodeError):
        committed.write(tmp_path / "page.html", "new\ud800")
    assert (tmp_path / "page.html").read_text() == "old" and files(tmp_path) == ["page.html"]


def test_a_solution_says_why_and_begins_no_html(monkeypatch):
    from minigrpo.exercises import reader

    monkeypatch.setattr(reader.find("1.2").reference, "why", "Not a <b>, but `<c>`.")
    source = committed.solution_cell("1.2").source
    begin = "<details><summary>Solution (try first)</summary>\n\n```python\nimport"
    assert source.startswith(begin)
    assert source.endswith("\n```\n\nNot a \\<b>, but `<c>`.\n\n</details>")


def test_a_kernel_imports_the_package_and_has_one_thread_if_it_is_one_of_several(monkeypatch):
    monkeypatch.delenv("MINIGRPO_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert "MINIGRPO_THREADS" not in kernels.environment()
    assert kernels.environment(2)["MINIGRPO_THREADS"] == "1"
    monkeypatch.setenv("MINIGRPO_THREADS", "4")
    assert kernels.environment(2)["MINIGRPO_THREADS"] == "4"
    assert kernels.environment()["PYTHONPATH"].split(os.pathsep) == [str(course.ROOT), "elsewhere"]


# ---------------------------------------------------------------------------------------------
# with kernels


@pytest.mark.kernel
def test_run_writes_pages_and_an_index(root, capsys, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")  # would leave the notebook without its figure
    path = write(root, "01_one", "import minigrpo", FIGURE, text=f"# A & B\n\n{LINKS}")
    before, out = path.read_bytes(), root / "build" / "course"
    out.mkdir(parents=True)
    (out / "09_gone.html").touch()
    assert call("run", root, "--only", "1") == 0
    said = capsys.readouterr().out
    assert re.search(r"^\[1/1\] 01_one: 2 cells in \d+\.\d s$", said, re.MULTILINE)
    assert re.search(r"^\d+ s in all; read on: .*index\.html$", said, re.MULTILINE)
    names = ["01_one.html", "01_one.ipynb", "02_two.html", "02_two.ipynb"]
    assert files(out) == [*names, "course.js", "index.html"]
    page = (out / "01_one.html").read_text("utf-8")
    assert 'href="02_two.html#here"' in page
    executed = nbformat.read(out / "01_one.ipynb", as_version=nbformat.NO_CONVERT)
    assert executed.cells[2].outputs[0].data["image/png"] in page
    index = (out / "index.html").read_text("utf-8")
    assert re.search(r'<a href="01_one.html">A &amp; B</a></h3>\n.*\n.*executed in \d+ s', index)
    assert re.search(r'<a href="02_two.html">Second</a></h3>\n.*\n<p class="facts"></p>', index)
    assert path.read_bytes() == before


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def f():\n    return {}['key']\n\nf()", "KeyError: 'key'"),
        ("import os\n\nos._exit(1)", "DeadKernelError"),
        ("import time\n\ntime.sleep(60)", "TimeoutError: no end after 2 s"),
    ],
)
def test_a_failure_names_notebook_cell_and_error(root, capsys, monkeypatch, source, error):
    monkeypatch.setattr(kernels, "TIMEOUT", 2)
    path = write(root, "01_one", "x = 1", source)
    before = path.read_bytes()
    assert call("execute", root) == 1
    printed = capsys.readouterr()
    assert f"FAILED: 01_one.ipynb, code cell 2 (id cell-2): {error}" in printed.err
    assert "\x1b" not in printed.err and "02_two" not in printed.out
    assert ("return {}['key']" in printed.err) == ("KeyError" in error)
    assert path.read_bytes() == before


CHECK = 'mine = check("1.2", mine)'
STUB = "from minigrpo.exercises import check\n\n\ndef mine(n):\n    raise NotImplementedError"
KNOWN = """\
from minigrpo.notebook import kept

print("known:", sorted(kept.recall("clinic")))
kept.remember("clinic", "4", {"right": True})"""


@pytest.mark.kernel
def test_execute_stores_what_is_committed_the_same_byte_for_byte_and_knows_no_reader(
    root, tmp_path, monkeypatch
):
    own = tmp_path / "own" / "progress"
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(own))
    flushes = "for i in range(3):\n    print(i, flush=True)"
    setup = "from minigrpo.notebook.setup import setup\n\nsetup()"
    sources = ["'ä'", flushes, setup, FIGURE, STUB, CHECK, KNOWN, "1 / 0"]
    path = write(root, "01_one", *sources, tags=("raises-exception",))
    stored = []
    for _ in range(2):
        assert call("execute", root, "--only", "1") == 0
        stored.append(path.read_bytes())
        edited = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        edited.cells[7].source = "an old solution"
        edited.cells[2].metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00"}
        nbformat.write(edited, path)
    assert call("run", root, "--only", "1") == 0
    assert stored[0] == stored[1] and not own.parent.exists()
    text = stored[0].decode("utf-8")
    assert "'ä'" in text and text.startswith('{\n "cells"') and text.endswith("}\n")
    cells = nbformat.reads(text, as_version=nbformat.NO_CONVERT).cells
    ids = ["top", *(f"cell-{n}" for n in range(1, 7)), "solution-1-2", "cell-7", "cell-8"]
    assert [cell.id for cell in cells] == ids
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8] and cells[2].metadata == {}
    assert [output.text for output in cells[2].outputs] == ["0\n1\n2\n"]
    assert cells[7].metadata == {"tags": ["solution"]} and "def causal_mask(" in cells[7].source
    assert cells[8].outputs[0].text == "known: []\n"
    png = base64.b64decode(cells[4].outputs[0].data["image/png"])
    shown = cells[4].outputs[0].metadata["image/png"]
    pixels = struct.unpack(">II", png[16:24])
    assert pixels == pytest.approx((2 * shown.width, 2 * shown.height), abs=1)
    at = png.index(b"pHYs") + 4
    assert struct.unpack(">I", png[at : at + 4])[0] == pytest.approx(200 / 0.0254, abs=1)


@pytest.mark.kernel
def test_the_notebooks_that_are_tested_know_no_reader_and_not_the_one_before(root, tmp_path):
    for stem in ("01_one", "02_two"):
        write(root, stem, KNOWN)
    assert call("execute", root) == 0
    own = tmp_path / "own" / "progress"
    options = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "-p", "conftest", "-q"]
    command = [sys.executable, "-m", "pytest", *options, "-c", str(course.ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, f"--rootdir={root}", str(root / "notebooks")],
        env={**os.environ, "PYTHONPATH": str(course.ROOT), "MINIGRPO_PROGRESS": str(own)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert not own.exists()


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("source", "tags", "finding"),
    [
        ("import sys\n\nprint('careful', file=sys.stderr)", (), "wrote to stderr: careful"),
        ("1", ("skip-execution",), "was not executed"),
    ],
)
def test_execute_leaves_alone_what_is_not_fit(root, capsys, source, tags, finding):
    path = write(root, "01_one", source, tags=tags)
    before = path.read_bytes()
    assert call("execute", root) == 1
    told = f"01_one.ipynb is left as it was: code cell 1 (id cell-1) {finding}"
    assert told in capsys.readouterr().err and path.read_bytes() == before


WAIT = """import os
import time

mine, other = {!r}
open(mine, "w").close()
began = time.time()
while not os.path.exists(other):
    assert time.time() - began < 60, "the other one never began"
assert os.environ["MINIGRPO_THREADS"] == "1\""""


@pytest.mark.kernel
def test_run_has_two_going_at_a_time_and_a_failure_stops_both(root, capsys, monkeypatch):
    begun = ["import time", "open('begun', 'w').close()\ntime.sleep(100)"]
    wait = "import os\nwhile not os.path.exists('begun'):\n    pass\n1 / 0"
    parts = {"01_one": notebook(wait), "02_two": notebook(*begun), "03_three": notebook("1")}
    made_up.course(root, parts)
    monkeypatch.setattr(course, "AT_A_TIME", 2)
    monkeypatch.delenv("MINIGRPO_THREADS", raising=False)
    assert call("run", root) == 1
    printed = capsys.readouterr()
    assert "FAILED: 01_one.ipynb, code cell 1 (id cell-1): ZeroDivisionError" in printed.err
    assert "[2/3] 02_two: stopped after" in printed.out and "03_three" not in printed.out

    one, two = (notebook(WAIT.format(names)) for names in (("1", "2"), ("2", "1")))
    made_up.course(root, {"01_one": one, "02_two": two})
    assert call("run", root) == 0
    assert capsys.readouterr().out.count("1 cells in") == 2


@pytest.mark.kernel
def test_ctrl_c_stops_the_kernels_and_leaves_nothing_half_written(root):
    source = "import os\nimport time\n\nopen({!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)"
    stems = ["01_one", "02_two"]
    for stem in stems:
        write(root, stem, source.format(stem))
    # As at a terminal, also where whoever tests ignores Ctrl-C (nohup, or & in a script).
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    run = f"{heard}import course\nraise SystemExit(course.main(['run', '--root', {str(root)!r}]))"
    paths = os.pathsep.join([str(Path(course.__file__).parent), str(course.ROOT)])
    command, own = [sys.executable, "-c", run], {**os.environ, "PYTHONPATH": paths}
    pipe = subprocess.PIPE
    ran = subprocess.Popen(command, env=own, stdout=pipe, stderr=pipe, text=True)
    running = [root / "notebooks" / stem for stem in stems[: kernels.AT_A_TIME]]
    end = time.monotonic() + 120
    while not all(kernel.exists() and kernel.read_text() for kernel in running):
        assert time.monotonic() < end and ran.poll() is None, "the kernels do not run"
        time.sleep(0.1)
    ran.send_signal(signal.SIGINT)
    printed, complained = ran.communicate(timeout=60)
    assert ran.returncode == 130 and complained == "interrupted\n"
    assert printed.count("stopped after") == len(running)
    names = [f"{stem}{suffix}" for stem in stems for suffix in (".html", ".ipynb")]
    assert files(root / "build" / "course") == [*names, "course.js", "index.html"]
    for kernel in running:
        with pytest.raises(ProcessLookupError):
            os.kill(int(kernel.read_text()), 0)
