"""Every patient is sick by its sign, and by its sign alone; the healthy code is not."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest

from minigrpo import clinic, grpo, objective
from minigrpo.arithmetic import Arithmetic
from minigrpo.clinic import diagnosis, patients
from minigrpo.clinic.charts import VITAL_SIGNS, Chart, measured
from minigrpo.clinic.diagnosis import Case
from minigrpo.clinic.patients import PATIENTS, WARDS, Patient

SEEDS = (0, 1, 2)
by_name = pytest.mark.parametrize("patient", PATIENTS, ids=lambda p: p.name.replace(" ", "_"))


@cache
def healthy_chart(config, task, base, seed) -> Chart:
    """Patients with the same settings share their healthy run."""
    patient = replace(PATIENTS[0], settings=vars(config), task=task, base=base)
    return clinic.run(patient, seed, sick=False)


@cache
def sick_chart(patient_name: str, seed: int) -> Chart:
    return clinic.run(clinic.record(patient_name), seed)


def healthy(patient: Patient, seed: int) -> Chart:
    return healthy_chart(patient.config(sick=False), patient.task, patient.base, seed)


@by_name
def test_the_signature_appears_in_the_sick_run_and_not_in_the_healthy_one(patient):
    for seed in SEEDS:
        well, sick = healthy(patient, seed), sick_chart(patient.name, seed)
        assert patient.is_sick(sick), f"seed {seed}: {patient.statistic(sick)}"
        assert not patient.is_sick(well), f"seed {seed}: {patient.statistic(well)}"
        assert math.isfinite(patient.statistic(well))
        assert len(well.steps) == well.config.steps and well.stopped is None


@by_name
def test_no_patient_is_a_crash(patient):
    for seed in SEEDS:
        chart = sick_chart(patient.name, seed)
        if patient.ward == patients.NAN:
            assert "the loss is nan" in chart.stopped
        else:
            assert chart.stopped is None and len(chart.steps) == chart.config.steps
            assert all(math.isfinite(m.loss) for m in chart.steps)


@by_name
def test_the_smallest_test_catches_the_bug(patient):
    assert clinic.caught(patient)


@by_name
def test_without_its_bug_nobody_is_caught(patient):
    assert not clinic.caught(replace(patient, switch=ExitStack, bug_settings={}))


@by_name
def test_the_bug_is_gone_after_the_block(patient):
    modules = (grpo, objective, Arithmetic)
    before = [dict(vars(module)) for module in modules]
    with patient.switch():
        changed = [dict(vars(module)) for module in modules] != before
    assert changed or patient.bug_settings
    assert [dict(vars(module)) for module in modules] == before


@by_name
def test_a_record_is_complete(patient):
    assert patient.ward in WARDS
    assert patient.vital_sign in VITAL_SIGNS
    for text in (patient.name, patient.what, patient.sign, patient.cure, patient.seen):
        assert text and "\n" not in text and not text.endswith(".")
    assert len(patient.cure) <= 100
    for url in re.findall(r"https?://\S+", patient.seen):
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url)


def test_there_are_patients_enough_and_no_ward_is_empty():
    assert len(PATIENTS) >= 16
    assert len({patient.name.lower() for patient in PATIENTS}) == len(PATIENTS)
    assert {patient.ward for patient in PATIENTS} == set(WARDS)
    names = [patient.name for patient in PATIENTS]
    blind = [patient.name for patient in clinic.numbered()]
    assert sorted(blind) == sorted(names) and blind != names


def test_record_finds_a_patient_by_name_and_refuses_another():
    assert clinic.record("K1 as the  loss").name == "k1 as the loss"
    with pytest.raises(KeyError, match="'flu'"):
        clinic.record("flu")


# --------------------------------------------------------------------------------------------
# the blind diagnosis


def number_of(name: str) -> int:
    return clinic.numbered().index(clinic.record(name)) + 1


@pytest.fixture
def cases(monkeypatch):
    """Blind runs are taken from the charts that are there."""

    def patient(number: int, seed: int = 0) -> Case:
        one = clinic.numbered()[number - 1]
        return Case(number, "Settings: SHORT.", sick_chart(one.name, seed), healthy(one, seed))

    monkeypatch.setattr(diagnosis, "patient", patient)


@by_name
def test_the_right_diagnosis_is_told_its_evidence_and_no_other_is_right(patient, cases):
    number = number_of(patient.name)
    right, text = clinic.judge(number, patient.name.upper(), seed=0)
    assert right
    assert patient.sign in text and patient.cure in text and patient.vital_sign in text
    assert clinic.complaint(patient) in text
    for other in PATIENTS:
        if other is not patient:
            right, text = clinic.judge(number, other.name, seed=0)
            assert not right and patient.name not in text
            assert ("The ward is the right one." in text) == (other.ward == patient.ward)


@by_name
def test_another_diagnosis_of_the_same_ward_can_be_told_apart(patient):
    """By their own numbers, or by one more line of the same table."""
    ill = sick_chart(patient.name, 0)
    apart = {
        other.name: {
            name
            for name, measure in VITAL_SIGNS.items()
            if differ(measure, ill, sick_chart(other.name, 0))
        }
        for other in PATIENTS
        if other is not patient and other.ward == patient.ward
    }
    assert all(apart.values()), apart


def differ(measure, one: Chart, other: Chart) -> bool:
    a, b = measured(measure, one), measured(measure, other)
    return math.isnan(a) != math.isnan(b) or abs(a - b) > 0.05 * max(abs(a), abs(b))


def test_a_real_blind_run_shows_both_charts(capsys):
    number = number_of("old log-probs not detached")
    case = clinic.patient(number)
    assert case.told == "The sums of notebook 07. 5 steps, with the settings of SHORT."
    assert "detached" not in str(case)
    lines = [line for line in str(case).splitlines() if line.startswith("norm of the gradient")]
    assert re.fullmatch(r"norm of the gradient, largest\s+0\.\d+\s+0", lines[0])
    clinic.diagnose(number, "old log-probs not detached")
    assert capsys.readouterr().out.startswith(
        f"Patient {number}: old log-probs not detached. Right."
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("...", "waits for a diagnosis"),
        ("", "waits for a diagnosis"),
        ("k1 as a loss", "Is 'k1 as the loss' meant?"),
        ("qqqq", "No diagnosis is called 'qqqq'. The names"),
    ],
)
def test_what_is_no_diagnosis_is_told_so(name, words):
    right, text = clinic.judge(7, name)
    assert not right and words in text


@pytest.mark.parametrize(
    ("number_is", "named", "words"),
    [
        ("the entropy bonus detached", "k1 as the loss", "is read with kl_weight = 1.0: here"),
        ("logits not shifted", "the clip on the wrong side", "inner_epochs = 8, lr = 0.0002: here"),
        ("KL to another model", "a policy scored on its own samples", "another model and task"),
        ("EOS masked out", "logits not shifted", "the healthy are there too"),
        ("KL to another model", "the mask below the line only", "something else on the chart fits"),
        ("stale old log-probs", "top-p in the sampler only", "who have it are above 0.02"),
    ],
)
def test_a_wrong_diagnosis_is_told_why(number_is, named, words, cases):
    assert words in clinic.judge(number_of(number_is), named, seed=0)[1]


@pytest.mark.parametrize("number", [0, 23, -1, 1.5, "7"])
def test_a_patient_that_does_not_exist(number):
    with pytest.raises(ValueError, match=f"number: expected 1 to 22, got {number!r}"):
        clinic.patient(number)
    with pytest.raises(ValueError, match="number: expected 1 to 22"):
        clinic.diagnose(number, "k1 as the loss")


# --------------------------------------------------------------------------------------------
# the page


def test_the_table_holds_every_symptom_cause_and_test():
    table = clinic.table()
    for patient in PATIENTS:
        assert patient.question in table
    assert table.count("<tr>") == len(PATIENTS) + 1
    spans = [int(n) for n in re.findall(r'rowspan="(\d+)"', table)]
    assert len(spans) == len(WARDS) and sum(spans) == len(PATIENTS)


@pytest.mark.parametrize("how", ["sequence_mean", "constant"])
def test_healthy_code_passes_under_other_settings_too(how):
    """The tests are for the reader's loop, whose settings are not those of the clinic."""
    other = {"temperature": 0.7, "how": how, "check": True}
    for test in {one.test for one in PATIENTS}:
        test(replace(clinic.SHORT, **other))
