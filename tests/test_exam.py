"""tools/exam.py on tiny notebooks: what it puts in, what it goes on after, what it writes down."""

from __future__ import annotations

import html
import re
from pathlib import Path

import exam
import nbformat
import pytest

from minigrpo.exercises.reader import all_exercises, find, solution_source
from minigrpo.notebook import kept

WRONG = "def sequence_log_probs(log_probs, mask):\n    return log_probs.sum(dim=-1)"
STUB = '''def {0}({1}):
    """What it is"""
    raise NotImplementedError'''


def stub(key: str) -> str:
    """The stub of an exercise, with the parameters of its reference."""
    function = find(key).reference
    return STUB.format(function.__name__, ", ".join(find(key).parameters))


def checked(key: str, cell: str) -> list[str]:
    name = find(key).reference.__name__
    return [cell, f'{name} = check("{key}", {name})']


def write(path: Path, cells: list[str], title: str) -> None:
    v4 = nbformat.v4
    code = [v4.new_code_cell(cell, id=f"cell-{number}") for number, cell in enumerate(cells)]
    nb = v4.new_notebook(cells=[v4.new_markdown_cell(f"# {title}", id="top"), *code])
    nbformat.write(nb, path)


USED = """\
rows = sequence_log_probs(torch.tensor([[-1.0, -2.0]]), torch.tensor([[1, 0]]))
assert rows.tolist() == [-1.0], "the course's version is used here"
assert completion_mask.status == "not attempted"
import os
assert os.environ["MINIGRPO_STRICT"] == "1"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a course with two notebooks: one with answers of all kinds, one that ends its kernel."""
    folder = tmp_path_factory.mktemp("course") / "notebooks"
    folder.mkdir()
    imports = "import torch\nfrom minigrpo.exercises import check, outcome, predict"
    two = [imports, *checked("2.1", solution_source("2.1")), *checked("2.3", WRONG)]
    two += [*checked("2.4", stub("2.4")), *checked("2.5", stub("2.5")), USED]
    two += ["raise ValueError('a slip of mine')", 'predict("02.factor", None)']
    two += ['predict("02.new", 3)', 'outcome("02.factor", 150000)', 'outcome("02.new", 4)']
    write(folder / "02_two.ipynb", two, "02 Two & more")
    three = [imports, *checked("3.1", "def letter_share(:"), "assert letter_share"]
    three += [*checked("3.3", stub("3.3")), "import os\nos._exit(1)"]
    write(folder / "03_three.ipynb", [*three, *checked("3.2", solution_source("3.2"))], "03 Three")
    return folder


@pytest.fixture(scope="module")
def done(folder, tmp_path_factory) -> dict:
    """An exam, its page, and all files as they were before and after."""
    own = folder.parent / "own.db"
    known = {
        "exercises": {"2.4": {"source": solution_source("2.4")}, "2.6": {"source": "x = 1"}},
        "predictions": {"02.factor": {"guess": 10.0}},
        "clinic": {"4": {"answer": "x", "right": True, "measured": []}},
    }
    out = folder.parent / "exam"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIGRPO_PROGRESS", str(own))
        for section, values in known.items():
            for key, value in values.items():
                kept.remember(section, key, value)
        before = {path: path.read_bytes() for path in (own, *folder.iterdir())}
        status = exam.main(["--notebooks", str(folder), "--out", str(out)])
        assert kept.path() == own
    after = {path: path.read_bytes() for path in (own, *folder.iterdir())}
    return {
        "status": status,
        "page": (out / "index.html").read_text(encoding="utf-8"),
        "unchanged": before == after,
    }


def text(page: str) -> str:
    """What a reader of the page reads, with single spaces."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page[page.index("<main>") :])).split())


@pytest.mark.kernel
def test_the_page_says_what_was_solved(done):
    assert done["status"] == 0
    said = text(done["page"])
    assert "2 of 12 exercises passed" in said
    for key, result in {"2.1": "✓ passed", "2.4": "✓ passed", "2.5": "– not attempted"}.items():
        assert f"{key} {find(key).title} {result}" in said
    assert f"2.6 {find('2.6').title} – not attempted" in said  # it isn't in the notebook
    assert re.search(
        r"2\.3 log-prob of a sequence 2\.3 \(.*?\): not right yet\. .* ✗ not pass", said
    )
    assert "expected" in said


@pytest.mark.kernel
def test_it_goes_on_with_the_courses_version_and_says_what_went_wrong_elsewhere(done):
    said = text(done["page"])
    assert "02 Two & more Ran to its end in" in said
    assert "Some cells raised an error. cell cell-10: ValueError: a slip of mine exercise" in said
    assert "cell-9" not in said  # what it asserts is so


@pytest.mark.kernel
def test_a_notebook_that_ends_its_kernel_is_told_and_the_others_go_on(done):
    said = text(done["page"])
    assert "03 Three Did not run to its end. cell cell-1: SyntaxError: " in said
    assert " cell cell-6: Kernel died exercise result 3.1 " in said
    assert "cell-3" not in said  # it has the course's version
    unknown = "NameError: name 'letter_share' is not defined"
    assert f"3.1 {find('3.1').title} {unknown} ✗ not passed" in said
    for key in ("3.2", "3.3"):
        assert f"{key} {find(key).title} – not attempted" in said


@pytest.mark.kernel
def test_predictions_and_diagnoses_are_on_the_page(done):
    said = text(done["page"])
    assert "02.factor 10 150,000 02.new 3 4" in said
    assert "1 of 25 patients diagnosed, 1 right" in said


@pytest.mark.kernel
def test_the_readers_files_are_left_as_they_are(done):
    assert done["unchanged"]


@pytest.mark.kernel
def test_the_page_loads_nothing_and_is_for_light_dark_and_paper(done):
    page = done["page"]
    assert not re.search(r"https?:|src=|<script|<link|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    assert 'lang="en"' in page and "<main>" in page and page.count("<h1>") == 1


def test_what_a_check_or_a_cell_says_is_no_html():
    said = {"2.3": "2.3 (log-prob): '<' not supported"}
    result = exam.Result("02_two", "A & B", ["2.3"], said, errors=["cell x: <b>"])
    shown = exam.section(result, {"2.3": "a < b"})
    assert not re.search(r"'<|<b>|< b|& B", shown)
    assert text(f"<main>{shown}").startswith("A & B Did not run to its end. cell x: <b> exercise")


def test_only_a_stub_is_filled(folder):
    nb = nbformat.read(folder / "02_two.ipynb", as_version=4)
    remembered = {key: {"source": "remembered"} for key in ("2.1", "2.3", "2.4")}
    sources = [cell.source for cell in exam.with_answers(nb, remembered).cells]
    assert sources.count("remembered") == 1
    assert sources[sources.index("remembered") + 1].startswith("sequence_ratio = check")


def test_every_stub_of_the_course_can_be_filled():
    filled, keys = 0, [exercise.key for exercise in all_exercises()]
    for path in sorted((exam.ROOT / "notebooks").glob("*.ipynb")):
        nb = nbformat.read(path, as_version=4)
        nb = exam.with_answers(nb, {key: {"source": "remembered"} for key in keys})
        filled += [cell.source for cell in nb.cells].count("remembered")
    assert filled == len(keys)


def test_what_cannot_be_run_is_no_exam(tmp_path, folder, capsys):
    out = tmp_path / "exam"
    assert exam.main(["--notebooks", str(tmp_path), "--out", str(out)]) == 1
    (tmp_path / "02_two.ipynb").write_text("{")
    assert exam.main(["--notebooks", str(tmp_path), "--out", str(out)]) == 1
    assert exam.main(["--notebooks", str(folder), "--only", "9", "--out", str(out)]) == 1
    assert capsys.readouterr().err.count("FAILED: ") == 3
    assert not out.exists()


def test_a_notebook_whose_library_is_missing_is_named(tmp_path, monkeypatch, capsys):
    write(tmp_path / "10_ten.ipynb", ["1"], "10 Ten")
    monkeypatch.setattr(exam, "lacks", lambda path: "no_such_library")
    assert exam.main(["--notebooks", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    said = text((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "10_ten not run: no_such_library isn't installed" in said
