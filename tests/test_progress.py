"""The file of progress: never lost, never in the way. What is drawn of it, and what is guessed."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minigrpo.exercises import all_exercises, answer, check, judge, outcome, predict, progress
from minigrpo.exercises.form import compiled
from minigrpo.exercises.reader import find
from minigrpo.notebook import kept
from minigrpo.notebook.progress import clinic_line, exercises

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "kept" / "progress.json"))
    new_kernel(monkeypatch)
    return tmp_path / "kept" / "progress.json"


def new_kernel(monkeypatch) -> None:
    monkeypatch.setattr(kept, "_here", {})
    monkeypatch.setattr(kept, "_told", set())


def diagnosis(right: bool, *measured: str) -> dict:
    return {"answer": "x", "right": right, "measured": list(measured)}


def started(code: str, *arguments: str, **options) -> subprocess.Popen:
    """Another process that has this module at hand as `kept`."""
    code = f"import sys; from minigrpo.notebook import kept; {code}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, **options)


def files(folder: Path) -> list[str]:
    """What is in a folder, beside the file that is locked."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# the file ----------------------------------------------------------------------------------------


def test_what_is_kept_is_there_in_the_next_kernel(file, monkeypatch):
    kept.remember("clinic", "4", diagnosis(True, "transcripts"))
    new_kernel(monkeypatch)
    assert kept.recall("clinic") == {"4": diagnosis(True, "transcripts")}
    assert json.loads(file.read_text())["version"] == kept.VERSION
    assert files(file.parent) == ["progress.json"]


@pytest.mark.parametrize("section", ["clinic", "predictions"])
def test_the_first_diagnosis_and_the_first_guess_stay(section, monkeypatch):
    kept.remember(section, "4", {"right": False})
    kept.remember(section, "4", {"right": True})
    new_kernel(monkeypatch)
    kept.remember(section, "4", {"right": True})
    assert kept.recall(section)["4"]["right"] is False


def test_of_answers_the_latest_stays_whichever_kernel_writes_last(file, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(kept.time, "time", lambda: next(clock))
    kept.remember("exercises", "2.4", {"source": "first"})
    old = {name: dict(known) for name, known in kept._here.items()}
    new_kernel(monkeypatch)
    kept.remember("exercises", "2.4", {"source": "second"})
    monkeypatch.setattr(kept, "_here", old)  # back in the first kernel
    kept.remember("exercises", "2.5", {"source": "other"})
    assert json.loads(file.read_text())["exercises"]["2.4"]["source"] == "second"
    assert kept.recall("exercises")["2.4"]["source"] == "second"
    kept.remember("exercises", "2.4", {"source": "third"})
    assert json.loads(file.read_text())["exercises"]["2.4"]["source"] == "third"


def test_two_kernels_at_once_lose_nothing(file):
    code = "[kept.remember(part, f'{sys.argv[1]}{n}', {}) for n in range(40) "
    code += "for part in ('clinic', 'exercises')]"
    both = [started(code, name) for name in "ab"]
    assert [one.wait(timeout=120) for one in both] == [0, 0]
    found = json.loads(file.read_text())
    assert len(found["clinic"]) == len(found["exercises"]) == 80


def test_no_kernel_writes_between_another_ones_reading_and_writing(file):
    """Each dwells on what it has read; without the lock the last one would write that alone."""
    code = (
        "import time; read = kept._read; "
        "kept._read = lambda file: (read(file), time.sleep(0.5))[0]; "
        "print(flush=True); sys.stdin.readline(); "
        "kept.remember('clinic', sys.argv[1], {'right': True})"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [started(code, name, **pipes) for name in "ab"]
    for one in both:
        assert one.stdout.readline() == "\n"  # it has imported all it needs
    for one in both:
        one.stdin.write("\n")
        one.stdin.flush()
    assert [one.communicate(timeout=60)[0] for one in both] == ["", ""]
    assert set(kept.recall("clinic")) == {"a", "b"}
    assert files(file.parent) == ["progress.json"]


def test_a_kernel_that_waits_in_vain_writes_nothing_and_forgets_nothing(file, monkeypatch, capsys):
    monkeypatch.setattr(kept, "PATIENCE", 0.05)
    kept.remember("clinic", "1", diagnosis(True))
    before = file.read_bytes()
    with kept._locked(file):
        kept.remember("clinic", "2", diagnosis(True))
        kept.remember("clinic", "3", diagnosis(True))
        assert file.read_bytes() == before
    assert capsys.readouterr().out.count("another kernel is busy with it") == 1
    kept.remember("clinic", "4", diagnosis(True))
    assert set(json.loads(file.read_text())["clinic"]) == {"1", "2", "3", "4"}


def test_the_lock_of_a_kernel_that_was_killed_is_free(file):
    code = "lock = kept._locked(kept.path()); lock.__enter__(); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = started(code, **pipes)
    holder.stdout.readline()
    holder.kill()
    holder.communicate()
    began = time.monotonic()
    kept.remember("clinic", "4", diagnosis(True))
    assert time.monotonic() - began < 2 and "4" in json.loads(file.read_text())["clinic"]


@pytest.mark.skipif(sys.platform == "win32", reason="another lock on this platform")
def test_where_there_are_no_locks_it_is_kept_all_the_same(file, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(kept.fcntl, "flock", refuse)
    kept.remember("clinic", "4", diagnosis(True))
    assert "4" in json.loads(file.read_text())["clinic"] and capsys.readouterr().out == ""


DEATHS = {
    "half written": "Path.write_text = lambda path, text, **_: (write(path, text[:9]), die())",
    "all written": "os.replace = lambda old, new: die()",
    "and renamed": "os.replace = lambda old, new: (replace(old, new), die())",
}


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL on this platform")
@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_killed_while_it_writes_it_loses_nothing_that_was_kept(file, death):
    code = "import os, signal; from pathlib import Path; kept.remember('clinic', '1', {}); "
    code += "write, replace = Path.write_text, os.replace; "
    code += "die = lambda: os.kill(os.getpid(), signal.SIGKILL); "
    writer = started(f"{code}{death}; kept.remember('clinic', '2', {{}})")
    assert writer.wait(timeout=60) == -signal.SIGKILL
    there = {"1", "2"} if death == DEATHS["and renamed"] else {"1"}
    assert set(json.loads(file.read_text())["clinic"]) == there
    kept.remember("clinic", "3", diagnosis(True))  # the lock is free
    assert set(json.loads(file.read_text())["clinic"]) == there | {"3"}
    assert files(file.parent) == ["progress.json"]


def test_a_write_that_fails_halfway_leaves_the_file_as_it_was(file, monkeypatch, capsys):
    kept.remember("clinic", "4", diagnosis(True))
    before = file.read_bytes()

    def half(path, text, **options):
        path.write_bytes(text.encode()[:10])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    kept.remember("clinic", "5", diagnosis(True))
    assert "no space left" in capsys.readouterr().out
    assert file.read_bytes() == before
    assert files(file.parent) == ["progress.json"]


BROKEN = ["{broken", "[]", '{"version": 1, "clinic": 3}', '{"version": 1, "clinic": {"4": 5}}']
BROKEN += ['"version"', "3", "\xff", "", "[" * 100_000, '{"version": "x"}', "null"]
BROKEN += ['{"clinic": {"4": {"measured": 1}}}', '{"exercises": {"2.4": {"source": 1}}}']
BROKEN += ['{"exercises": {"2.4": {"at": "now"}}}', '{"predictions": {"07.x": {"guess": "a"}}}']


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_set_aside_and_what_the_kernel_knows_is_kept_anew(file, text, capsys):
    kept.remember("clinic", "3", diagnosis(True))
    file.write_bytes(text.encode("latin-1"))
    assert set(kept.recall("clinic")) == {"3"}
    assert file.read_bytes() == text.encode("latin-1")  # reading alone changes nothing
    kept.remember("exercises", "2.4", {"source": "mine"})
    found = json.loads(file.read_text())
    assert found["clinic"] == {"3": diagnosis(True)} and found["exercises"]["2.4"]
    aside = file.parent / "progress.broken-1.json"
    assert aside.read_bytes() == text.encode("latin-1")
    printed = capsys.readouterr().out
    assert str(file) in printed and aside.name in printed and printed.count("\n") == 2


def test_no_broken_file_is_written_over(file, capsys):
    for number in (1, 2, 3):
        kept.remember("clinic", str(number), diagnosis(True))
        file.write_text(f"broken {number}")
    kept.remember("clinic", "4", diagnosis(True))
    texts = [(file.parent / f"progress.broken-{n}.json").read_text() for n in (1, 2, 3)]
    assert texts == ["broken 1", "broken 2", "broken 3"]
    assert set(json.loads(file.read_text())["clinic"]) == {"1", "2", "3", "4"}


def test_a_file_of_a_newer_edition_is_left_alone(file, capsys):
    file.parent.mkdir()
    file.write_text(text := '{"version": 99, "all": "different"}')
    for number in ("4", "5"):
        kept.remember("clinic", number, diagnosis(True))
    assert set(kept.recall("clinic")) == {"4", "5"}
    printed = capsys.readouterr().out
    assert printed.count("a newer edition of the course has written") == 2  # kept, and read
    assert file.read_text() == text and files(file.parent) == ["progress.json"]


def test_a_file_of_an_older_edition_is_read_and_what_is_unknown_in_it_stays(file):
    """The first edition kept the clinic alone; a file without a version is older still."""
    file.parent.mkdir()
    for text in ('{"version": 1, "clinic": {"7": {"right": true}}}', '{"later": {"a": {"b": 1}}}'):
        file.write_text(text)
        kept.remember("exercises", "2.4", {"source": "mine"})
        found = json.loads(file.read_text())
        assert found["version"] == 1 and found["clinic"] == {"7": {"right": True}}
        assert found["exercises"]["2.4"]["source"] == "mine"
    assert found["later"] == {"a": {"b": 1}}


def test_without_a_home_folder_it_costs_a_sentence(monkeypatch, capsys):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MINIGRPO_PROGRESS")
    monkeypatch.setattr(kept.Path, "home", homeless)
    kept.remember("clinic", "4", diagnosis(True))
    assert kept.recall("clinic") == {"4": diagnosis(True)}
    assert "home directory" in capsys.readouterr().out


def test_where_nothing_can_be_written_this_kernel_still_knows(tmp_path, monkeypatch, capsys):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "a file" / "progress.json"))
    kept.remember("clinic", "4", diagnosis(False))
    kept.remember("clinic", "4", diagnosis(True))
    assert kept.recall("clinic") == {"4": diagnosis(False)}
    predict("07.accuracy", 0.6)
    outcome("07.accuracy", 0.98)
    printed = capsys.readouterr().out
    assert printed.count("can't be kept") == 1 and "you guessed 0.6" in printed


def test_what_did_not_happen_is_no_outcome(capsys):
    predict("03.steps", 14)
    outcome("03.steps", None)
    assert capsys.readouterr().out.endswith("steps: it didn't happen.\n")
    assert kept.recall("outcomes") == {}


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root writes anywhere")
@pytest.mark.parametrize("name", ["kept", "kept/progress.json"])
def test_what_is_read_only_costs_a_sentence(file, name, capsys):
    kept.remember("clinic", "3", diagnosis(True))
    (file.parent.parent / name).chmod(0o500 if name == "kept" else 0o400)
    kept.remember("clinic", "4", diagnosis(True))
    assert "can't be kept" in capsys.readouterr().out
    assert set(kept.recall("clinic")) == {"3", "4"}


def test_a_read_only_file_stays_as_it_is_although_its_folder_could_be_written(
    file, monkeypatch, capsys
):
    kept.remember("clinic", "3", diagnosis(True))
    before = file.read_bytes()
    monkeypatch.setattr(kept.os, "access", lambda path, mode: mode != os.W_OK)  # root may write
    kept.remember("clinic", "4", diagnosis(True))
    assert "is read-only" in capsys.readouterr().out and file.read_bytes() == before
    assert set(kept.recall("clinic")) == {"3", "4"}


def test_a_folder_in_the_place_of_the_file_costs_a_sentence(file, capsys):
    file.mkdir(parents=True)
    kept.remember("clinic", "4", diagnosis(True))
    assert kept.recall("clinic") == {"4": diagnosis(True)}
    assert "can't be kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("platform", "variable", "value", "place"),
    [
        ("linux", "XDG_DATA_HOME", "/x", "/x"),
        ("linux", "XDG_DATA_HOME", "", "/home/.local/share"),
        ("darwin", "XDG_DATA_HOME", "/x", "/home/Library/Application Support"),
        ("win32", "LOCALAPPDATA", "/x", "/x"),
        ("win32", "LOCALAPPDATA", "", "/home/AppData/Local"),
    ],
)
def test_without_a_name_it_is_where_programs_keep_their_data(
    platform, variable, value, place, monkeypatch
):
    monkeypatch.delenv("MINIGRPO_PROGRESS")
    monkeypatch.setattr(kept.sys, "platform", platform)
    monkeypatch.setattr(kept.Path, "home", lambda: Path("/home"))
    monkeypatch.setenv(variable, value)
    assert kept.path() == Path(place, "minigrpo", "progress.json")


# what check remembers ----------------------------------------------------------------------------

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


def test_a_pass_is_remembered_with_the_whole_cell_and_the_latest_counts(capsys):
    for note in ("# first", "# second"):
        source = RIGHT.format(note)
        assert check("2.3", written(source)["sequence_log_probs"]).passed
        assert kept_source("2.3") == source.strip("\n")
    check("2.3", written("def f(log_probs, mask):\n    return log_probs\n")["f"])
    capsys.readouterr()
    answer("2.3")
    printed = capsys.readouterr().out
    assert printed == source
    assert judge("2.3", written(printed)["sequence_log_probs"])[0] == "passed"


def test_what_did_not_pass_or_was_only_judged_is_not_remembered(file, capsys):
    right = written(RIGHT.format("pass"))["sequence_log_probs"]
    judge("2.3", right)
    check("2.3", lambda log_probs, mask: log_probs)
    assert not file.exists()
    capsys.readouterr()
    answer("2.3")
    assert capsys.readouterr().out == "No answer of yours to 2.3 has passed yet.\n"
    with pytest.raises(KeyError):
        answer("2.99")


def test_a_strict_pass_is_remembered_too(monkeypatch):
    monkeypatch.setenv("MINIGRPO_STRICT", "1")
    check("2.3", written(RIGHT.format("pass"))["sequence_log_probs"])
    assert "2.3" in kept.recall("exercises")


def test_a_review_is_remembered_when_its_line_is_right_too(capsys):
    review = find("8.1")
    source = "def test(function):\n    return reference(function)\n\n\nline = 1\n"
    notebook = written(source)
    notebook["reference"] = review.reference
    check("8.1", notebook["test"], 99)
    assert kept.recall("exercises") == {}
    check("8.1", notebook["test"], review.line)
    assert kept_source("8.1") == source.strip("\n")


def test_the_courses_own_function_is_no_answer_and_replaces_none(file, capsys):
    check("2.3", find("2.3").reference)
    assert not file.exists()
    passed = check("2.3", written(RIGHT.format("pass"))["sequence_log_probs"])
    check("2.3", find("2.3").reference)
    check("2.3", check("2.3", passed))
    assert "helper" in kept_source("2.3")


class Odd:
    """Its source can't be found, and asking for it is no pleasure."""

    @property
    def __module__(self):
        raise ValueError

    def __call__(self, log_probs, mask):
        return find("2.3").reference(log_probs, mask)


def test_an_answer_without_a_source_passes_and_replaces_none(capsys):
    names = {"torch": torch, "__name__": "__main__"}
    exec(RIGHT.format("pass"), names)
    sourceless = names["sequence_log_probs"]
    assert check("2.3", sourceless).passed and kept_source("2.3") == ""
    answer("2.3")
    assert "has passed, but its source couldn't be found" in capsys.readouterr().out
    check("2.3", written(RIGHT.format("pass"))["sequence_log_probs"])
    check("2.3", sourceless)
    assert check("2.3", Odd()).passed
    assert "helper" in kept_source("2.3")


def test_of_a_file_only_the_lines_of_the_function_are_kept():
    def sequence_log_probs(log_probs, mask):
        return log_probs.masked_fill(mask == 0, 0.0).sum(dim=-1)

    check("2.3", sequence_log_probs)
    assert kept_source("2.3").startswith("def sequence_log_probs(log_probs, mask):\n    return ")
    assert kept_source("2.3").count("\n") == 1


# guesses -----------------------------------------------------------------------------------------


def test_a_guess_and_what_came_out(capsys, monkeypatch):
    predict("07.accuracy", None)
    outcome("07.accuracy", torch.tensor(0.98046))
    predict("07.accuracy", 0.6)
    predict("07.accuracy", 0.6)
    new_kernel(monkeypatch)
    predict("07.accuracy", 0.9)
    predict("07.accuracy", None)
    outcome("07.accuracy", 0.98046)
    assert capsys.readouterr().out.splitlines() == [
        "accuracy: put a number in place of None, and run this cell again.",
        "accuracy: it came out at 0.98.",
        "accuracy: your guess is 0.6.",
        "accuracy: your guess is 0.6.",
        "accuracy: your first guess counts, and it was 0.6.",
        "accuracy: your guess is 0.6.",
        "accuracy: you guessed 0.6, and it came out at 0.98.",
    ]
    assert kept.recall("predictions") == {"07.accuracy": {"guess": 0.6}}
    assert kept.recall("outcomes")["07.accuracy"]["value"] == 0.98046


@pytest.mark.parametrize(
    ("guess", "value", "said"),
    [
        (3, 4, "you guessed 3, and it came out at 4."),
        (0.123456, 0.2, "you guessed 0.123, and it came out at 0.2."),
        (1234.5678, 135168, "you guessed 1,235, and it came out at 135,168."),
        (100, float("nan"), "you guessed 100, and it came out at nan."),
        (-1, float("-inf"), "you guessed -1, and it came out at -inf."),
        (1e-5, 0, "you guessed 1e-05, and it came out at 0."),
    ],
)
def test_both_numbers_look_alike(guess, value, said, capsys, monkeypatch):
    predict("01.tokens_per_second", guess)
    outcome("01.tokens_per_second", value)
    assert capsys.readouterr().out.splitlines()[1] == f"tokens per second: {said}"
    new_kernel(monkeypatch)
    assert said[:-1] in repr(progress())


@pytest.mark.parametrize("key", ["accuracy", "7.accuracy", "07.", "07.Accuracy", "07", 7, "00.x"])
def test_a_key_of_another_form_is_refused(key):
    for call in (predict, outcome):
        with pytest.raises(ValueError, match='such as "07.accuracy", got'):
            call(key, 1)


@pytest.mark.parametrize("guess", ["0.6", "60%", [0.6], True, float("nan"), torch.ones(1)])
def test_a_guess_that_is_no_number_is_refused(guess, file):
    with pytest.raises(TypeError, match="guess: expected a number, such as 0.6, got"):
        predict("07.accuracy", guess)
    assert not file.exists()


# what is drawn -----------------------------------------------------------------------------------


def test_the_exercises_are_those_of_the_records():
    assert [key for *_, keys in exercises() for key in keys] == [e.key for e in all_exercises()]


def test_before_anything_is_done_it_is_one_inviting_sentence():
    drawn = progress()
    assert repr(drawn).count("\n") == 0 and len(repr(drawn)) < 200
    assert drawn._repr_html_() == f"<p>{drawn!r}</p>"
    assert str(len(all_exercises())) in repr(drawn)


def test_what_was_done_is_drawn_the_same_in_both_forms():
    kept.remember("exercises", "2.1", {"source": ""})
    kept.remember("exercises", "2.3", {"source": ""})
    kept.remember("exercises", "99.1", {"source": ""})  # of another edition
    kept.remember("predictions", "07.accuracy", {"guess": 0.6})
    kept.remember("predictions", "03.leash", {"guess": 5.0})
    kept.remember("outcomes", "07.accuracy", {"value": 0.98})
    kept.remember("clinic", "4", diagnosis(True, "transcripts"))
    text, drawn = repr(progress()), progress()._repr_html_()
    assert f"You've passed 2 of {len(all_exercises())} exercises, 2 guesses made." in text
    assert re.search(r"^  02  #\.#\.\.\.  +2 of 6  The probability", text, re.M)
    assert "  07.accuracy: you guessed 0.6, and it came out at 0.98\n" in text
    assert "  03.leash: you guessed 5\n" in text
    assert "1 of 25 patients diagnosed, 1 right" in text
    plain = re.sub(r"<[^>]*>", " ", drawn)
    for part in ("●○●○○○", "2 of 6", clinic_line(), "07.accuracy", "0.98", "03.leash"):
        assert part in plain
    assert drawn.count('<tr><th scope="row"') == 11 + 2
    assert text.count("\n") < 16 and max(map(len, text.splitlines())) <= 115


def test_the_drawing_brings_no_colors_scripts_or_addresses_of_its_own():
    kept.remember("exercises", "2.1", {"source": ""})
    drawn = progress()._repr_html_()
    assert not re.search(r"class=|<script|http|color|background|<img", drawn)
    marks = re.findall(r"<span[^>]*>[●○]+", drawn)
    assert len(marks) == 11 and all('aria-hidden="true"' in mark for mark in marks)


def test_the_terminal_prints_the_same_without_torch():
    kept.remember("exercises", "2.1", {"source": ""})
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-X", "importtime", "-m", "minigrpo.notebook.progress"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{progress()!r}\n"
    assert "torch" not in done.stderr


def test_the_score_in_words():
    assert "no diagnosis yet; 25 patients are waiting" in clinic_line()
    kept.remember("clinic", "4", diagnosis(True, "transcripts"))
    kept.remember("clinic", "5", diagnosis(False, "transcripts", "padding"))
    assert "2 of 25 patients diagnosed, 1 right" in clinic_line()
    assert "1.5 measurements" in clinic_line()
