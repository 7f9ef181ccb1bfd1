"""A new edition does not fight with a reader's answers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import update

NAME, CLINIC = "02_sequence_probability.ipynb", "08_bug_clinic.ipynb"
ANSWER = (
    "import torch\n\nZERO = 0.0\n\n\n"
    "def token_log_probs(logits, input_ids):\n    return logits.log_softmax(-1) + ZERO"
)
TEST = "line = 4\n\n\ndef test_kl_per_token(function):\n    assert function"


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    update.git(*identity, *words, root=folder)


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def source_of(path: Path, key: str) -> str:
    """What stands in the place of the stub of an exercise."""
    cells = next(cells for found, _, cells in update.exercises(read(path)) if found == key)
    return update.source(cells[-1])


def write(path: Path, sources: dict[str, str], text: str) -> None:
    """Put these in the place of the stubs, and a text at the top."""
    notebook = read(path)
    for key, _, cells in update.exercises(notebook):
        if key in sources:
            cells[-1]["source"] = sources[key]
    note = {"cell_type": "markdown", "id": "n", "metadata": {}, "source": text}
    notebook["cells"].insert(0, note)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.fixture
def course(tmp_path):
    """The course as it is published, and the reader's copy of it, with answers."""
    published, mine = tmp_path / "published", tmp_path / "mine"
    (published / "notebooks").mkdir(parents=True)
    for name in (NAME, CLINIC):
        shutil.copy(update.ROOT / "notebooks" / name, published / "notebooks")
    git(published, "init", "-q", "-b", "main")
    git(published, "add", ".")
    git(published, "commit", "-qm", "first")
    git(tmp_path, "clone", "-q", "published", "mine")
    answers = {"2.1": ANSWER, "2.2": "def sequence_log_probs(log_probs, mask):\n    return ("}
    asked = "model, prompt_ids, prompt_mask, completions, mask, temperature"
    answers["2.4"] = f"def score({asked}):\n    return mask  # not"
    answers["2.3"] = "def completion_mask(completions, eos_id):\n    return completions"
    write(mine / "notebooks" / NAME, answers, "my notes")
    write(mine / "notebooks" / CLINIC, {"8.1": TEST}, "my notes")
    return published, mine


def test_answers_survive_an_update_that_a_plain_pull_refuses(course, capsys):
    published, mine = course
    new = mine / "notebooks" / NAME
    before = new.read_bytes()
    stub = 'def completion_mask(completions, eos_ids):\n    """It"""\n    raise NotImplementedError'
    write(published / "notebooks" / NAME, {"2.3": stub}, "# A new text\n")
    git(published, "commit", "-qam", "second")
    with pytest.raises(RuntimeError, match="would be overwritten"):
        git(mine, "pull", "--ff-only")

    update.update(mine)
    assert source_of(new, "2.1") == ANSWER
    assert "# not" in source_of(new, "2.4") and "return (" in source_of(new, "2.2")
    assert "raise NotImplementedError" in source_of(new, "2.5")
    assert source_of(new, "2.3") == stub
    assert read(new)["cells"][0]["source"] == "# A new text\n"
    assert source_of(mine / "notebooks" / CLINIC, "8.1") == TEST  # a line and a test
    (kept,) = (mine / "answers").glob(f"*/{NAME}")
    assert kept.read_bytes() == before
    out = capsys.readouterr().out
    assert f"{NAME}: answers put back: 2.1, 2.2, 2.4\n" in out
    assert f"because the exercise has changed: 2.3\n  Yours: {kept}\n" in out
    tool = mine / "tools" / "course" / "update.py"
    tool.parent.mkdir(parents=True)
    shutil.copy(update.__file__, tool)  # once more, with nothing new and without any package
    subprocess.run([sys.executable, "-S", tool], check=True)
    assert source_of(new, "2.1") == ANSWER


def test_if_nothing_can_be_fetched_all_stays_as_it_is(course):
    published, mine = course
    before = (mine / "notebooks" / NAME).read_bytes()
    shutil.rmtree(published)
    with pytest.raises(RuntimeError, match="git pull"):
        update.update(mine)
    assert (mine / "notebooks" / NAME).read_bytes() == before


def test_a_notebook_that_is_gone_is_in_the_copy_and_one_that_was_deleted_comes_back(course, capsys):
    published, mine = course
    before = (mine / "notebooks" / NAME).read_bytes()
    (mine / "notebooks" / CLINIC).unlink()
    git(published, "rm", "-q", f"notebooks/{NAME}")
    git(published, "commit", "-qm", "second")
    update.update(mine)
    assert [path.name for path in (mine / "notebooks").iterdir()] == [CLINIC]
    (kept,) = (mine / "answers").glob("*/*.ipynb")
    assert kept.read_bytes() == before
    said = capsys.readouterr().out
    assert f"{NAME}: is not part of the course any more. Yours: {kept}\n" in said


def test_every_exercise_of_the_course_is_found_and_is_a_stub():
    for path in sorted((update.ROOT / "notebooks").glob("*.ipynb")):
        found = [*update.exercises(read(path))]
        assert len(found) >= 3 or path.stem.startswith("appendix")
        for _, name, cells in found:
            code = update.source(cells[-1])
            assert f"def {name}(" in code and update.STUB.search(code), name
