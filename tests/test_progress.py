"""The file of progress: never lost, never in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minigrpo.notebook import kept, progress

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "kept" / "progress.json"))
    new_kernel(monkeypatch)
    return tmp_path / "kept" / "progress.json"


def new_kernel(monkeypatch) -> None:
    monkeypatch.setattr(kept, "_here", {})
    monkeypatch.setattr(kept, "_told", set())


def answer(right: bool, *measured: str) -> dict:
    return {"answer": "x", "right": right, "measured": list(measured)}


def test_what_is_kept_is_there_in_the_next_kernel(file, monkeypatch):
    progress.remember("clinic", "4", answer(True, "transcripts"))
    new_kernel(monkeypatch)
    assert progress.recall("clinic") == {"4": answer(True, "transcripts")}
    assert json.loads(file.read_text())["version"] == 1
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"]


def test_the_first_answer_stays(file, monkeypatch):
    progress.remember("clinic", "4", answer(False))
    new_kernel(monkeypatch)
    progress.remember("clinic", "4", answer(True))
    assert progress.recall("clinic")["4"]["right"] is False


def test_the_first_answer_stays_where_nothing_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "a file" / "progress.json"))
    progress.remember("clinic", "4", answer(False))
    progress.remember("clinic", "4", answer(True))
    assert progress.recall("clinic") == {"4": answer(False)}


def test_two_kernels_at_once_lose_nothing(file):
    code = (
        "import sys; from minigrpo.notebook import progress\n"
        "for n in range(40): progress.remember('clinic', f'{sys.argv[1]}{n}', {'right': True})"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen([sys.executable, "-c", code, name], env=env) for name in "ab"]
    assert [one.wait(timeout=120) for one in both] == [0, 0]
    assert len(progress.recall("clinic")) == 80


def test_no_kernel_writes_between_another_ones_reading_and_writing(file):
    """Each dwells on what it has read; without the lock the last one would write that alone."""
    code = (
        "import sys, time; from minigrpo.notebook import progress\n"
        "read = progress._merged\n"
        "progress._merged = lambda: (read(), time.sleep(0.5))[0]\n"
        "print(flush=True); sys.stdin.readline()\n"
        "progress.remember('clinic', sys.argv[1], {'right': True})"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen([*command, name], env=env, **pipes) for name in "ab"]
    for one in both:
        assert one.stdout.readline() == "\n"  # it has imported all it needs
    for one in both:
        one.stdin.write("\n")
        one.stdin.flush()
    assert [one.communicate(timeout=60)[0] for one in both] == ["", ""]
    assert set(progress.recall("clinic")) == {"a", "b"}
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"]


def test_a_write_that_fails_halfway_leaves_the_file_as_it_was(file, monkeypatch, capsys):
    progress.remember("clinic", "4", answer(True))
    before = file.read_bytes()

    def half(path, text, **options):
        path.write_bytes(text.encode()[:10])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    progress.remember("clinic", "5", answer(True))
    assert "no space left" in capsys.readouterr().out
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"]


def test_without_a_home_folder_it_costs_a_sentence(monkeypatch, capsys):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MINIGRPO_PROGRESS")
    monkeypatch.setattr(progress.Path, "home", homeless)
    progress.remember("clinic", "4", answer(True))
    assert progress.recall("clinic") == {"4": answer(True)}
    assert "home directory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["{broken", "[]", '{"version": 99, "clinic": {}}', '{"version": 1, "clinic": 3}',
     '{"version": 1, "clinic": {"4": 5}}', '"version"', "3", "\xff",
     '{"version": 1, "clinic": {"4": {"measured": 1}}}'],
)  # fmt: skip
def test_a_file_that_is_not_ours_costs_a_sentence_and_stays_as_it_is(file, text, capsys):
    file.parent.mkdir()
    file.write_bytes(text.encode("latin-1"))
    progress.remember("clinic", "4", answer(True))
    assert progress.recall("clinic") == {"4": answer(True)}  # this kernel still knows
    assert "1 of 25 patients diagnosed, 1 right" in progress.clinic_line()
    printed = capsys.readouterr().out
    assert str(file) in printed and printed.count("\n") <= 2
    assert file.read_bytes() == text.encode("latin-1")


def test_a_folder_that_cannot_be_written_costs_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "a file" / "progress.json"))
    progress.remember("clinic", "4", answer(True))
    assert "can't be kept" in capsys.readouterr().out
    assert progress.recall("clinic") == {"4": answer(True)}


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_costs_a_sentence(file, capsys):
    file.parent.mkdir()
    file.parent.chmod(0o500)
    progress.remember("clinic", "4", answer(True))
    assert "can't be kept" in capsys.readouterr().out


def test_a_lock_left_behind_is_not_waited_for_for_ever(file, monkeypatch):
    file.parent.mkdir()
    file.with_name(".progress.json.lock").touch()
    monkeypatch.setattr(progress.time, "sleep", lambda seconds: None)
    ticks = iter(range(0, 1000, 3))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(ticks))
    progress.remember("clinic", "4", answer(True))
    assert json.loads(file.read_text())["clinic"] and not list(file.parent.glob("*.lock"))


def test_the_score_in_words(capsys):
    progress.progress()
    assert "no diagnosis yet; 25 patients are waiting" in capsys.readouterr().out
    progress.remember("clinic", "4", answer(True, "transcripts"))
    progress.remember("clinic", "5", answer(False, "transcripts", "padding"))
    progress.progress()
    printed = capsys.readouterr().out
    assert "2 of 25 patients diagnosed, 1 right" in printed and "1.5 measurements" in printed


@pytest.mark.parametrize(
    ("platform", "variable", "value"),
    [("linux", "XDG_DATA_HOME", "/x"), ("win32", "LOCALAPPDATA", "/x"), ("darwin", "HOME", "/x")],
)
def test_without_a_name_it_is_where_programs_keep_their_data(
    platform, variable, value, monkeypatch
):
    monkeypatch.delenv("MINIGRPO_PROGRESS")
    monkeypatch.setattr(progress.sys, "platform", platform)
    monkeypatch.setenv(variable, value)
    assert progress.path().parts[-2:] == ("minigrpo", "progress.json")
    assert progress.path().parts[1] == "x"
