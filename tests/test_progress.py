"""The file of progress: never lost, never in the way. What is drawn of it, and what is guessed."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from minigrpo.exercises import all_exercises, answer, check, judge, outcome, predict, progress
from minigrpo.exercises.form import compiled, notebooks
from minigrpo.exercises.reader import find
from minigrpo.notebook import kept
from minigrpo.notebook.progress import PREDICTIONS, clinic_line, worth

ROOT = Path(__file__).resolve().parent.parent
SAID = "Your progress can't be kept or read"


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "kept" / "progress.db"))
    monkeypatch.setattr(kept, "_unwritten", {})
    kept._say.cache_clear()
    return tmp_path / "kept" / "progress.db"


def diagnosis(right: bool, *measured: str) -> dict:
    return {"answer": "x", "right": right, "measured": list(measured)}


def started(code: str, *arguments: str, **options) -> subprocess.Popen:
    """Another process that has this module at hand as `kept`."""
    code = f"import sys; from minigrpo.notebook import kept; {code}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, **options)


def of_the_edition_before(file: Path, text: str) -> Path:
    before = file.with_suffix(".json")
    before.parent.mkdir(exist_ok=True)
    before.write_text(text)
    return before


def test_of_guesses_and_diagnoses_the_first_counts_and_of_answers_the_latest():
    """Whichever process comes later, and it knows them all."""
    for section in ("clinic", "predictions", "exercises"):
        kept.remember(section, "b", {"n": 1})
        kept.remember(section, "a", {"n": 1})
        kept.remember(section, "b", {"n": 2})
    code = "kept.remember('clinic', 'b', {}); kept.remember('exercises', 'a', {'n': 3}); "
    code += "print(*map(kept.recall, ('clinic', 'predictions', 'exercises')), sep=';')"
    told = started(code).communicate(timeout=60)[0]
    first, latest = "{'b': {'n': 1}, 'a': {'n': 1}}", [{"n": 2}, {"n": 3}]
    assert told.split(";")[:2] == [first, first]  # in the order in which they came
    assert [kept.recall("exercises")[key] for key in "ba"] == latest


def test_four_kernels_at_once_lose_nothing_nor_what_the_edition_before_kept(file):
    of_the_edition_before(file, '{"version": 1, "clinic": {"7": {"right": true}}}')
    code = "[kept.remember(part, f'{sys.argv[1]}{n}', {}) for n in range(12) "
    code += "for part in ('clinic', 'exercises')]"
    four = [started(code, name) for name in "abcd"]
    assert [one.communicate(timeout=120) for one in four] == [("", None)] * 4
    assert len(kept.recall("clinic")) == 49 and len(kept.recall("exercises")) == 48


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL on this platform")
def test_killed_while_it_writes_it_loses_nothing_that_was_kept():
    code = "[(kept.remember('clinic', str(n), {}), print(n, flush=True)) for n in range(10**6)]"
    writer = started(code)
    last = [writer.stdout.readline() for _ in range(30)][-1]
    writer.kill()
    writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    kept.remember("clinic", "mine", {})  # nothing is locked
    assert {"mine", *map(str, range(int(last) + 1))} <= set(kept.recall("clinic"))


def test_a_kernel_that_waits_in_vain_writes_nothing_and_forgets_nothing(file, monkeypatch, capsys):
    monkeypatch.setattr(kept, "PATIENCE", 0.05)
    kept.remember("clinic", "1", {})
    with closing(sqlite3.connect(file)) as other:
        other.execute("BEGIN EXCLUSIVE")
        kept.remember("clinic", "2", {"n": 1})
        kept.remember("clinic", "2", {"n": 2})
        kept.remember("clinic", "3", {})
        assert kept.recall("clinic") == {"2": {"n": 1}, "3": {}}
    assert capsys.readouterr().out == f"{SAID} in {file}: database is locked.\n"
    kept.remember("clinic", "4", {})
    told = started("print(kept.recall('clinic'))").communicate(timeout=60)[0]
    assert told == f"{ {'1': {}, '2': {'n': 1}, '3': {}, '4': {}} }\n"


OBSTACLES = {
    "a folder": lambda file: file.mkdir(parents=True),
    "a text": lambda file: (file.parent.mkdir(), file.write_text('{"version": 1}' * 100)),
    "a file in place of its folder": lambda file: file.parent.write_text(""),
}


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES)
def test_where_nothing_can_be_written_this_kernel_still_knows(file, obstacle, capsys):
    obstacle(file)
    before = file.is_file() and file.read_bytes()
    kept.remember("exercises", "2.4", {"source": "first"})
    kept.remember("exercises", "2.4", {"source": "second"})
    predict("07.bases_of_ten", 0.6)
    predict("07.bases_of_ten", 0.7)
    outcome("07.bases_of_ten", 0.98)
    assert kept.recall("exercises") == {"2.4": {"source": "second"}}
    printed = capsys.readouterr().out
    assert printed.count(SAID) == 1 and f"in {file}: " in printed
    assert "you guessed 0.6, and it came out at 0.98" in printed
    assert before == (file.is_file() and file.read_bytes())


def test_a_read_only_file_is_read_and_costs_a_sentence(file, monkeypatch, capsys):
    kept.remember("exercises", "2.3", {"source": "mine"})
    kept.remember("predictions", "07.x", {"guess": 1})
    before, connect = file.read_bytes(), sqlite3.connect
    read_only = lambda file, **options: connect(f"{file.as_uri()}?mode=ro", uri=True)  # noqa: E731
    monkeypatch.setattr(kept.sqlite3, "connect", read_only)  # root may write anywhere
    kept.remember("exercises", "2.4", {})
    kept.remember("exercises", "2.3", {"source": "newer"})
    kept.remember("predictions", "07.x", {"guess": 2})
    assert kept.recall("exercises") == {"2.3": {"source": "newer"}, "2.4": {}}
    assert kept.recall("predictions") == {"07.x": {"guess": 1}}
    assert capsys.readouterr().out.count(SAID) == 1 and file.read_bytes() == before


def test_without_a_home_folder_it_costs_a_sentence(monkeypatch, capsys):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MINIGRPO_PROGRESS")
    monkeypatch.setattr(kept.Path, "home", homeless)
    kept.remember("clinic", "4", diagnosis(True))
    assert kept.recall("clinic") == {"4": diagnosis(True)}
    assert "home directory" in capsys.readouterr().out


def test_without_a_name_it_is_where_programs_keep_their_data(monkeypatch):
    monkeypatch.delenv("MINIGRPO_PROGRESS")
    monkeypatch.setattr(kept.Path, "home", lambda: Path("/home"))
    for platform, variable, value, place in (
        ("linux", "XDG_DATA_HOME", "/x", "/x"),
        ("linux", "XDG_DATA_HOME", "", "/home/.local/share"),
        ("darwin", "XDG_DATA_HOME", "/x", "/home/Library/Application Support"),
        ("win32", "LOCALAPPDATA", "/x", "/x"),
        ("win32", "LOCALAPPDATA", "", "/home/AppData/Local"),
    ):
        monkeypatch.setattr(kept.sys, "platform", platform)
        monkeypatch.setenv(variable, value)
        assert kept.path() == Path(place, "minigrpo", "progress.db")


def test_what_the_edition_before_kept_is_taken_over_once(file, monkeypatch):
    text = '{"version": 1, "clinic": {"7": {"right": true}}, "exercises": {"2.4": {"source": "x"}}}'
    before = of_the_edition_before(file, text)
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(before))  # as its reader may have set it
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "read_bytes", Mock(side_effect=KeyboardInterrupt))
        kept.recall("clinic")  # which is done again, as nothing has come of it
    assert kept.path() == file and kept.recall("clinic") == {"7": {"right": True}}
    kept.remember("exercises", "2.4", {"source": "newer"})
    before.write_text(text.replace("7", "8"))
    assert kept.recall("exercises") == {"2.4": {"source": "newer"}}
    assert set(kept.recall("clinic")) == {"7"} and before.read_text() == text.replace("7", "8")


@pytest.mark.parametrize("text", ["{broken", "[]", '{"clinic": 3}', '{"clinic": {"4": 5}}', "\xff"])
def test_a_broken_file_of_the_edition_before_is_left_alone(file, text, capsys):
    before = of_the_edition_before(file, text)
    kept.remember("clinic", "3", {})
    assert kept.recall("clinic") == {"3": {}} and before.read_text() == text
    assert capsys.readouterr().out == ""


RIGHT = """\
def helper(log_probs, mask):
    return log_probs.masked_fill(mask == 0, 0.0)


def sequence_log_probs(log_probs, mask):
    {}
    return helper(log_probs, mask).sum(dim=-1)
"""


def written(source: str) -> dict:
    """A notebook's names after a cell with this source."""
    notebook: dict = {"__name__": "__main__", "torch": torch}
    compiled(source, "__name__", notebook, "<a cell>")
    return notebook


def kept_source(key: str) -> str:
    return kept.recall("exercises")[key]["source"]


def test_a_pass_is_remembered_with_the_whole_cell_and_the_latest_counts(capsys, monkeypatch):
    for strict in ("", "1"):
        monkeypatch.setenv("MINIGRPO_STRICT", strict)
        source = RIGHT.format(f"# strict: {strict}")
        assert check("2.2", written(source)["sequence_log_probs"]).passed
        assert kept_source("2.2") == source.strip("\n")
    monkeypatch.delenv("MINIGRPO_STRICT")
    check("2.2", written("def f(log_probs, mask):\n    return log_probs\n")["f"])
    capsys.readouterr()
    answer("2.2")
    printed = capsys.readouterr().out
    assert printed == source
    assert judge("2.2", written(printed)["sequence_log_probs"])[0] == "passed"


def test_what_did_not_pass_or_was_only_judged_is_not_remembered(file, capsys):
    right = written(RIGHT.format("pass"))["sequence_log_probs"]
    judge("2.2", right)
    check("2.2", lambda log_probs, mask: log_probs)
    capsys.readouterr()
    answer("2.2")
    assert capsys.readouterr().out == "No answer of yours to 2.2 has passed yet.\n"
    with pytest.raises(KeyError):
        answer("2.99")
    assert not file.exists()  # who only looks gets none


def test_a_review_is_remembered_when_its_line_is_right_too():
    review = find("8.1")
    source = "def test(function):\n    return reference(function)\n\n\nline = 1\n"
    notebook = written(source)
    notebook["reference"] = review.reference
    check("8.1", notebook["test"], 99)
    assert kept.recall("exercises") == {}
    check("8.1", notebook["test"], review.line)
    assert kept_source("8.1") == source.strip("\n")


def test_the_courses_own_function_and_one_without_a_source_replace_no_answer(capsys):
    check("2.2", find("2.2").reference)
    assert kept.recall("exercises") == {}
    names = {"torch": torch, "__name__": "__main__"}
    exec(compile(RIGHT.format("pass"), "<nowhere>", "exec"), names)
    sourceless = names["sequence_log_probs"]
    assert check("2.2", sourceless).passed and kept_source("2.2") == ""
    answer("2.2")
    assert "has passed, but its source couldn't be found" in capsys.readouterr().out
    passed = check("2.2", written(RIGHT.format("pass"))["sequence_log_probs"])
    for other in (find("2.2").reference, check("2.2", passed), sourceless):
        assert check("2.2", other).passed and "helper" in kept_source("2.2")


def test_of_a_file_only_the_lines_of_the_function_are_kept():
    def sequence_log_probs(log_probs, mask):
        return log_probs.masked_fill(mask == 0, 0.0).sum(dim=-1)

    check("2.2", sequence_log_probs)
    assert kept_source("2.2").startswith("def sequence_log_probs(log_probs, mask):\n    return ")
    assert kept_source("2.2").count("\n") == 1


def test_a_guess_and_what_came_out(capsys):
    predict("07.bases_of_ten", None)
    outcome("07.bases_of_ten", torch.tensor(0.98046))
    for guess in (0.6, 0.6, 0.9, None):
        predict("07.bases_of_ten", guess)
    outcome("07.bases_of_ten", None)
    assert kept.recall("outcomes") == {}
    outcome("07.bases_of_ten", 0.98046)
    assert capsys.readouterr().out.splitlines() == [
        "bases of ten: put a number in place of None, and run this cell again.",
        "bases of ten: it came out at 0.98.",
        "bases of ten: your guess is 0.6.",
        "bases of ten: your guess is 0.6.",
        "bases of ten: your first guess counts, and it was 0.6.",
        "bases of ten: your guess is 0.6.",
        "bases of ten: it didn't happen.",
        "bases of ten: you guessed 0.6, and it came out at 0.98.",
    ]
    assert kept.recall("outcomes") == {"07.bases_of_ten": {"value": 0.98046}}


def test_both_numbers_look_alike(capsys):
    numbers = {0.123456: (4, "0.123", "4"), 1234.5678: (135168, "1,235", "135,168")}
    numbers[-1] = float("-inf"), "-1", "-inf"
    for word, (guess, (value, first, second)) in zip(PREDICTIONS["12"], numbers.items()):
        predict(key := f"12.{word}", guess)
        outcome(key, value)
        said = f"you guessed {first}, and it came out at {second}"
        assert capsys.readouterr().out.endswith(f"{word.replace('_', ' ')}: {said}.\n")
        assert f"  {key}: {said}\n" in repr(progress())


@pytest.mark.parametrize(
    ("key", "known"),
    [("accuracy", "as 02"), ("7.accuracy", "as 02"), (7, "as 02")]
    + [(key, "07.groups_.*bases_of_ten") for key in ("07.", "07.Bases_of_ten", "07", "07.bases")],
)
def test_an_unknown_key_is_refused(key, known, file):
    for call in (predict, outcome):
        with pytest.raises(ValueError, match=f"a prediction of the course, .*{known}.*, got"):
            call(key, 1)
    assert not file.exists()


@pytest.mark.parametrize("guess", ["0.6", [0.6], True, float("nan"), torch.ones(1)])
def test_a_guess_that_is_no_number_is_refused(guess, file):
    with pytest.raises(TypeError, match="guess: expected a number, such as 0.6, got"):
        predict("07.bases_of_ten", guess)
    assert not file.exists()


def test_before_anything_is_done_it_is_one_inviting_sentence():
    kept.remember("clinic", "4: transcripts", {})  # which is no diagnosis yet
    drawn = progress()
    assert repr(drawn).count("\n") == 0 and drawn._repr_html_() == f"<p>{drawn!r}</p>"
    assert not re.search(r" \d\d ", repr(drawn))  # every notebook stores it, and counts change
    assert "no diagnosis yet; 28 patients are waiting" in clinic_line()


def test_what_was_done_is_drawn_the_same_in_both_forms():
    for key in ("2.1", "2.3", "99.1"):  # the last is of another edition
        kept.remember("exercises", key, {"source": ""})
    kept.remember("predictions", "07.bases_of_ten", {"guess": 0.6})
    kept.remember("predictions", "03.leash", {"guess": 5.0})
    kept.remember("outcomes", "07.bases_of_ten", {"value": 0.98})
    kept.remember("clinic", "4: transcripts", {})
    kept.remember("clinic", "4", diagnosis(True, "transcripts"))
    kept.remember("clinic", "5", diagnosis(False, "transcripts", "padding"))
    assert "2 of 28 patients diagnosed, 1 right" in clinic_line()
    assert clinic_line().endswith("3 points.")
    assert worth("healthy", ["groups"] * 3) == 2 < worth("k1 as the loss", ["groups"]) == 3
    text, drawn = repr(progress()), progress()._repr_html_()
    assert f"You've passed 2 of {len(all_exercises())} exercises, 2 guesses made." in text
    assert re.search(r"^  02  #\.#\.\.  +2 of 5  The probability", text, re.M)
    assert "  07.bases_of_ten: you guessed 0.6, and it came out at 0.98\n" in text
    assert "  03.leash: you guessed 5\n" in text and text.endswith(f"\n{clinic_line()}")
    plain = re.sub(r"<[^>]*>", " ", drawn)
    for part in ("●○●○○", "2 of 5", "07.bases_of_ten", "0.98", "03.leash", "not yet"):
        assert part in plain
    assert clinic_line() in plain
    assert drawn.count('<tr><th scope="row"') == len(notebooks()) + 2
    assert not re.search(r"class=|<script|http|color|background|<img", drawn)
    marks = re.findall(r"<span[^>]*>[●○]+", drawn)
    assert len(marks) == len(notebooks()) and all('aria-hidden="true"' in mark for mark in marks)


def test_the_terminal_prints_the_same():
    kept.remember("exercises", "2.1", {"source": ""})
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "minigrpo.notebook.progress"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{progress()!r}\n"
