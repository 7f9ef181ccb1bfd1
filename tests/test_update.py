"""A new edition does not fight with a reader's answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import update

ROOT = Path(__file__).resolve().parent.parent
NAME = "02_sequence_probability.ipynb"
ANSWER = (
    "import torch\n\nZERO = 0.0\n\n\ndef log_product(probs):\n    return probs.log().sum(-1) + ZERO"
)


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells_of(path: Path, key: str) -> list[dict]:
    return next(cells for found, _, cells in update.exercises(update.read(path)) if found == key)


def write(path: Path, edit) -> None:
    notebook = update.read(path)
    edit({key: cells for key, _, cells in update.exercises(notebook)}, notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.fixture
def course(tmp_path):
    """The course as it is published, and the reader's copy of it."""
    published, mine = tmp_path / "published", tmp_path / "mine"
    (published / "notebooks").mkdir(parents=True)
    for name in (NAME, "08_bug_clinic.ipynb"):
        shutil.copy(ROOT / "notebooks" / name, published / "notebooks")
    git(published, "init", "-q", "-b", "main")
    git(published, "config", "user.name", "n")
    git(published, "config", "user.email", "e@example.org")
    git(published, "add", ".")
    git(published, "commit", "-qm", "first")
    git(tmp_path, "clone", "-q", "published", "mine")
    return published, mine


def answered(cells, notebook):
    cells["2.1"][-1]["source"] = ANSWER
    cells["2.2"][-1]["source"] = "def token_log_probs(logits, input_ids):\n    return logits  # not"
    cells["2.3"][-1]["source"] = "def sequence_log_probs(log_probs, mask):\n    return ("
    cells["2.5"][-1]["source"] = "def completion_mask(completions, eos_id):\n    return completions"
    notebook["cells"][0]["source"] = "my notes"


def published_anew(cells, notebook):
    cells["2.5"][-1]["source"] = (
        "def completion_mask(completions, eos_ids):\n    raise NotImplementedError"
    )
    notebook["cells"][1]["source"] = "# A new text\n"
    notebook["cells"].insert(0, {"cell_type": "markdown", "id": "n", "metadata": {}, "source": "x"})


def test_answers_survive_an_update_that_a_plain_pull_refuses(course, capsys):
    published, mine = course
    write(mine / "notebooks" / NAME, answered)
    before = (mine / "notebooks" / NAME).read_bytes()
    write(published / "notebooks" / NAME, published_anew)
    git(published, "commit", "-qam", "second")
    with pytest.raises(AssertionError, match="would be overwritten"):
        git(mine, "pull", "--ff-only")

    update.update(mine)
    new = mine / "notebooks" / NAME
    assert "".join(cells_of(new, "2.1")[-1]["source"]) == ANSWER
    assert "# not" in "".join(cells_of(new, "2.2")[-1]["source"])
    assert "return (" in "".join(cells_of(new, "2.3")[-1]["source"])
    assert "raise NotImplementedError" in "".join(cells_of(new, "2.4")[-1]["source"])
    assert "eos_ids" in "".join(cells_of(new, "2.5")[-1]["source"])
    assert update.read(new)["cells"][2]["source"] == "# A new text\n"
    (kept,) = (mine / "answers").glob(f"*/{NAME}")
    assert kept.read_bytes() == before
    out = capsys.readouterr().out
    assert "answers put back: 2.1, 2.2, 2.3\n" in out
    assert "because the exercise has changed: 2.5" in out
    update.update(mine)  # and once more, with nothing new
    assert "".join(cells_of(new, "2.1")[-1]["source"]) == ANSWER


def test_if_nothing_can_be_fetched_all_stays_as_it_is(course):
    published, mine = course
    write(mine / "notebooks" / NAME, answered)
    before = (mine / "notebooks" / NAME).read_bytes()
    shutil.rmtree(published)
    with pytest.raises(RuntimeError, match="git pull"):
        update.update(mine)
    assert (mine / "notebooks" / NAME).read_bytes() == before


def test_a_notebook_that_is_gone_is_in_the_copy_and_one_that_was_deleted_comes_back(course, capsys):
    published, mine = course
    write(mine / "notebooks" / NAME, answered)
    before = (mine / "notebooks" / NAME).read_bytes()
    (mine / "notebooks" / "08_bug_clinic.ipynb").unlink()
    git(published, "rm", "-q", f"notebooks/{NAME}")
    git(published, "commit", "-qm", "second")
    update.update(mine)
    assert [path.name for path in (mine / "notebooks").iterdir()] == ["08_bug_clinic.ipynb"]
    (kept,) = (mine / "answers").glob("*/*.ipynb")
    assert kept.read_bytes() == before
    said = capsys.readouterr().out
    assert f"{NAME}: is not part of the course any more. Yours: {kept}\n" in said


def test_a_write_that_fails_leaves_the_new_notebook_whole(course, monkeypatch):
    published, mine = (folder / "notebooks" / NAME for folder in course)
    write(mine, answered)
    before = published.read_bytes()

    def half(path, text, **_):
        path.write_bytes(text.encode()[:99])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="disk full"):
        update.carry(mine, published)
    assert published.read_bytes() == before


def test_answers_of_another_copy_without_git(course, tmp_path):
    published, mine = course
    write(mine / "notebooks" / NAME, answered)
    tool = published / "tools" / "update.py"
    tool.parent.mkdir()
    shutil.copy(update.__file__, tool)
    done = subprocess.run(
        [sys.executable, tool, "--answers-of", mine], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"{NAME}: answers put back: 2.1, 2.2, 2.3, 2.5\n" in done.stdout
    assert "08_bug_clinic.ipynb: answers put back: none\n" in done.stdout
    assert "".join(cells_of(published / "notebooks" / NAME, "2.1")[-1]["source"]) == ANSWER
    nowhere = [sys.executable, tool, "--answers-of", tmp_path]
    assert subprocess.run(nowhere, capture_output=True).returncode == 1


def test_the_line_of_a_review_is_carried_with_its_test(course):
    _, mine = course
    path = mine / "notebooks" / "08_bug_clinic.ipynb"
    test = "line = 4\n\n\ndef test_token_log_probs(function):\n    assert function"

    def solved(cells, notebook):
        cells["8.1"][-1]["source"] = test

    write(path, solved)
    update.update(mine)
    cells = cells_of(path, "8.1")
    assert "".join(cells[-1]["source"]) == test and len(cells) == 2


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_every_exercise_of_the_course_is_found_and_is_a_stub(path):
    number = 0
    for _, name, cells in update.exercises(update.read(path)):
        assert f"def {name}(" in "".join(cells[-1]["source"])
        assert update.parameters("".join(cells[-1]["source"]), name) is None
        number += 1
    assert number >= 3
