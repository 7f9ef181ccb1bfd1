"""The budget of measurements and the first diagnosis outlive a kernel: a new one for each part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minigrpo import clinic
from minigrpo.clinic import diagnosis
from minigrpo.clinic.diagnosis import Case
from minigrpo.clinic.measure import Subject
from minigrpo.clinic.patients import numbered

ROOT = Path(__file__).resolve().parent.parent
START = """\
from minigrpo import clinic
from minigrpo.clinic import diagnosis

for name, (line, _) in diagnosis.MEASUREMENTS.items():  # without a run
    diagnosis.MEASUREMENTS[name] = line, lambda subject, name=name: {name: 1.0}
diagnosis.Case._against = lambda case, name: "Why not."
case = clinic.patient(8)
"""


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "progress.db"))
    return tmp_path / "progress.db"


def in_a_new_kernel(code: str) -> str:
    """What a fresh interpreter prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", START + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_a_restarted_kernel_refills_no_budget_and_takes_no_first_diagnosis(monkeypatch, capsys):
    measured = {n: ("", lambda subject, n=n: {n: 1.0}) for n in diagnosis.MEASUREMENTS}
    monkeypatch.setattr(diagnosis, "MEASUREMENTS", measured)
    for name in ("weight change", "groups", "groups", "transcripts"):  # in this one
        clinic.patient(8).measure(name)
    clinic.patient(5).measure("exchange tests")
    first = capsys.readouterr().out
    assert [f"({left} of 3 measurements left)" in first for left in range(3)] == [True] * 3
    again = in_a_new_kernel(
        "case.measure(' Transcripts')\ncase.measure('exchange tests')\ncase.measure()\n"
        "case.diagnose('healthy')"
    )
    shown, refused = first.index("transcripts, patient 8"), again.index("You've used your 3")
    assert again[:refused] == first[shown : first.index("exchange tests, patient 5")]
    assert ": weight change, groups, transcripts. Time for case.diagnose" in again
    assert "You have 0 of 3 left for patient 8. Used: weight change, groups" in again
    assert "'healthy' isn't it." in again and "first answer" not in again
    free = in_a_new_kernel(
        "case.measure()\ncase.measure('exchange tests')\n"
        "case.diagnose('0 divided by 0')\nclinic.tally()"
    )
    assert free.startswith("Yours are free now for patient 8.")
    assert "exchange tests, patient 8 (free now)" in free
    assert "Your first answer counts, and it was 'healthy'." in free
    assert "1 of 28 patients diagnosed, 0 right at the first attempt, 0 points." in free


def test_where_nothing_can_be_kept_the_kernel_counts_all_the_same(file, monkeypatch, capsys):
    file.mkdir()
    measured = {name: ("", lambda subject: {"a number": 1.0}) for name in "abcd"}
    monkeypatch.setattr(diagnosis, "MEASUREMENTS", measured)
    case = Case(8, Subject(numbered()[7], 33))
    said = [case.measurement(name) for name in "abcad"]
    assert said[0] != said[3] and said[3].splitlines()[1:] == said[0].splitlines()[1:]
    assert "Used: a, b, c." in case.measurement() and said[4].startswith("You've used your 3")
    assert capsys.readouterr().out.count("can't be kept") == 1
