"""tools/course/exam.py on tiny notebooks: what it puts in, goes on after, and writes down."""

import html
import re
from pathlib import Path

import exam
import listing
import made_up
import nbformat
import pytest

from minigrpo.exercises.reader import all_exercises, find, solution_source
from minigrpo.notebook import kept

WRONG = "def sequence_log_probs(log_probs, mask):\n    return log_probs.sum(dim=-1)"
IMPORTS = "import torch\nfrom minigrpo.exercises import check, outcome, predict"
USED = """\
rows = sequence_log_probs(torch.tensor([[-1.0, -2.0]]), torch.tensor([[1, 0]]))
assert rows.tolist() == [-1.0], "the course's version is used here"
assert sample.status == "not attempted"
"""


def stub(key: str) -> str:
    """The stub of an exercise, with the parameters of its reference."""
    name, asked = find(key).reference.__name__, ", ".join(find(key).parameters)
    return f'def {name}({asked}):\n    """What it is"""\n    raise NotImplementedError'


def checked(key: str, cell: str) -> list[str]:
    name = find(key).reference.__name__
    return [cell, f'{name} = check("{key}", {name})']


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A course of two notebooks: one with answers of all kinds, one that ends its kernel."""
    two = [IMPORTS, *checked("2.1", solution_source("2.1")), *checked("2.2", WRONG)]
    two += [*checked("2.3", stub("2.3")), *checked("2.5", stub("2.5")), USED]
    two += ["raise ValueError('a slip of mine')", 'predict("02.factor", None)']
    two += ['check("1.2", None)']  # of another notebook
    two += ['predict("03.steps", 3)', 'outcome("02.factor", 150000)', 'outcome("03.steps", 4)']
    three = [IMPORTS, *checked("3.1", "def letter_share(:"), "assert letter_share"]
    three += [*checked("3.3", stub("3.3")), "import os\nos._exit(1)"]
    three += checked("3.2", solution_source("3.2"))
    course = {"02_two": made_up.notebook(*two), "03_three": made_up.notebook(*three)}
    text = "3.2 (x): passed, all 9 cases."
    passed = nbformat.v4.new_output("display_data", {"text/html": "", "text/plain": text})
    course["03_three"].cells[-1].outputs = [passed]  # before; now it isn't reached
    root = made_up.course(tmp_path_factory.mktemp("course"), course)
    (root / "minigrpo").mkdir()
    (root / "minigrpo" / "exercises").symlink_to(listing.ROOT / "minigrpo" / "exercises")
    return root


@pytest.fixture(scope="module")
def done(root) -> dict:
    """An exam and its page, and whether the reader's files are as before."""
    own, notebooks = root / "own", [*(root / "notebooks").iterdir()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIGRPO_PROGRESS", str(own))
        kept.remember("exercises", "2.3", {"source": solution_source("2.3")})
        kept.remember("exercises", "2.4", {"source": "x = 1"})
        kept.remember("predictions", "02.factor", {"guess": 10.0})
        kept.remember("clinic", "4", {"answer": "x", "right": True, "measured": []})
        before = [path.read_bytes() for path in (own, *notebooks)]
        status = exam.main(["--root", str(root)])
    unchanged = before == [path.read_bytes() for path in (own, *notebooks)]
    page = (root / "build" / "exam" / "index.html").read_text(encoding="utf-8")
    return {"status": status, "page": page, "unchanged": unchanged, "said": text(page)}


def text(page: str) -> str:
    """What a reader of the page reads, with single spaces."""
    body = page[page.index("<main") :] if "<main" in page else page
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


@pytest.mark.kernel
def test_the_page_says_what_was_solved(done):
    said = done["said"]
    assert done["status"] == 0 and "2 of 12 exercises passed" in said
    assert "02 Two 2 of 5 exercises passed" in said
    assert "✓ 2.1 passed ✗ 2.2 not passed 2.2 (log-prob of a seq" in said
    assert re.search(r"2\.2 \(.*?\): not right yet\. .*expected.* ✓ 2\.3 passed", said)
    # 2.4 is not in the notebook
    assert "✓ 2.3 passed – 2.4 not attempted – 2.5 not attempted" in said
    for guess in ("02.factor: you guessed 10, came out at 150,000", "03.steps: you guessed 3,"):
        assert guess in said
    assert "1 of 28 patients diagnosed, 1 right" in said


@pytest.mark.kernel
def test_it_goes_on_with_the_courses_version_and_says_what_went_wrong_elsewhere(done):
    assert "code cell 11 (id cell-11): ValueError: a slip of mine ✓ 2.1" in done["said"]
    assert "cell-10" not in done["said"]  # what it asserts is so


@pytest.mark.kernel
def test_a_notebook_that_ends_its_kernel_is_told_and_the_others_go_on(done):
    said = done["said"]
    assert "03 Three 0 of 7 exercises passed code cell 2 (id cell-2): SyntaxError: " in said
    died = r"did not run to its end: code cell 7 \(id cell-7\): DeadKernelError: Kernel died"
    died += r" ✗ 3\.1 not passed 3\.1 \([^)]*\): not right yet\. Expected your function, got"
    assert re.search(died, said)
    assert "cell-4" not in said  # it has the course's version
    assert "without calling it. The notebook goes on" in said and '"3.1"). – 3.2 not' in said
    assert "– 3.3 not attempted" in said


@pytest.mark.kernel
def test_the_readers_files_are_left_alone_and_the_page_loads_nothing(done):
    assert done["unchanged"]
    assert not re.search(r"https?:|src=|<script|<link|url\(|@import", done["page"])


def test_what_a_check_or_a_cell_says_is_no_html(root):
    said = {"2.3": "2.3 (log-prob): '<' not supported"}
    section = exam.section(listing.notebooks(root)[0], said, ["cell x: <b>"])
    assert not re.search(r"'<|<b>", section)
    assert "0 of 1 exercises passed cell x: <b> ✗ 2.3" in text(section)


def test_every_stub_of_the_course_can_be_filled_and_nothing_else(root):
    remembered = {exercise.key: {"source": "remembered"} for exercise in all_exercises()}
    filled = []
    for notebook in [*listing.notebooks(), listing.notebooks(root)[0]]:
        nb = exam.with_answers(nbformat.read(notebook.location, as_version=4), remembered)
        filled.append([cell.source for cell in nb.cells].count("remembered"))
    assert sum(filled[:-1]) == len(remembered) and filled[-1] == 2  # two of its four are answered


def test_a_notebook_whose_library_is_missing_is_named(tmp_path):
    root = made_up.course(tmp_path, {"10_ten": made_up.notebook("1")})
    with (root / "course.toml").open("a") as entries:
        entries.write('needs = "no_such_library"\n')
    assert exam.main(["--root", str(root)]) == 0
    page = (root / "build" / "exam" / "index.html").read_text(encoding="utf-8")
    assert "Ten: not run, no_such_library isn't installed" in page
