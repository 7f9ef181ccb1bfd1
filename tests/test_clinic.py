"""Every patient is sick by its sign, the healthy code is not, and nothing gives a name away."""

import html
import inspect
import math
import re
from dataclasses import replace

import pytest
from loop_tests import ask

from minigrpo import clinic, grpo, logprobs, objective, sampling
from minigrpo.arithmetic import Arithmetic
from minigrpo.clinic import diagnosis
from minigrpo.clinic.diagnosis import FIRST_SEED, Case, provenance
from minigrpo.clinic.measure import MEASUREMENTS, TWIN_SEED, Subject, reading
from minigrpo.clinic.patients import PATIENTS, Patient, names, notes_by_diagnosis, numbered
from minigrpo.notebook import progress

DECOYS = sorted({*names()} - {one.name for one in PATIENTS})
ILL = [one for one in PATIENTS if one.sign_read]
by_name = pytest.mark.parametrize("patient", PATIENTS, ids=lambda p: p.key or p.name)
if_ill = pytest.mark.parametrize("patient", ILL, ids=lambda p: p.name)


def read(subject: Subject, one: Patient) -> float:
    at = one.sign_read
    return reading(subject, at.measurement, at.reading, at.index)


@pytest.fixture(autouse=True)
def a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "progress.db"))
    diagnosis.patient.cache_clear()


def test_a_name_without_a_patient_is_refused():
    with pytest.raises(KeyError, match="expected one of those in PATIENTS, got 'flu'"):
        clinic.record("flu")


@if_ill
def test_the_sign_appears_in_the_patient_and_not_in_its_twin(patient):
    subject = case_of(patient).patient
    assert patient.sign_read.fits(read(subject, patient))
    value = read(subject.twin, patient)
    assert math.isfinite(value) and not patient.sign_read.fits(value)


def test_each_patient_has_a_seed_of_its_own_and_the_twins_have_another():
    seeds = [clinic.patient(number).patient.seed for number in range(1, 29)]
    assert seeds == [number + FIRST_SEED for number in range(1, 29)]
    assert {clinic.patient(number).twin.seed for number in range(1, 29)} == {TWIN_SEED}
    assert TWIN_SEED not in seeds


def test_a_healthy_patient_is_slower_than_its_twin_by_luck_alone():
    case = clinic.patient(7)
    slow, twin = (s.chart.last("reward") for s in (case.patient, case.twin))
    assert case.patient.patient.key == "healthy, ordinary" and slow < twin - 0.05
    text = case.judged("healthy")
    assert "a seed isn't a bug" in text and "rounding" not in text and "github" not in text
    text = clinic.patient(24).judged("healthy")
    assert "rounding" in text and "trl/issues/4159" in text and "less lucky" not in text


@by_name
def test_no_patient_is_a_crash(patient):
    chart = case_of(patient).patient.chart
    if patient.ward == "the loss is NaN":
        assert "the loss is nan" in chart.stopped
    else:
        assert chart.stopped is None and len(chart.steps) == patient.setting.config.steps
        assert all(math.isfinite(m.loss) for m in chart.steps)


@if_ill
def test_the_smallest_test_catches_the_bug_and_passes_without_it(patient):
    ask(*patient.test, config=patient.config(sick=False))
    with patient.switch(), pytest.raises(AssertionError) as complaint:
        ask(*patient.test, config=patient.config(sick=True))
    assert len(str(complaint.value)) > 20


def test_with_another_engine_the_smallest_tests_pass_but_those_that_need_a_tolerance():
    exact = {
        "sampler_and_scorer_agree",
        "the_ratio_is_1_at_every_first_update",
        "the_loss_is_the_one_by_hand",
    }
    (rounded,) = (one for one in PATIENTS if one.key == "healthy, rounded sampler")
    with rounded.switch():
        for test in {one.test for one in ILL if one.test[0] not in exact}:
            ask(*test, config=replace(clinic.SHORT, check=False))


def test_the_healthy_patient_with_another_engine_is_off_1_by_rounding_alone():
    (rounded,) = (one for one in PATIENTS if one.key == "healthy, rounded sampler")
    subject = case_of(rounded).patient
    largest = reading(subject, "scorer against sampler", "largest difference (nats)")
    mean = reading(subject, "scorer against sampler", "mean of scorer's / sampler's probability")
    assert 1e-3 < largest < 0.2 and abs(mean - 1) < 0.01
    gain = subject.chart.last("reward") - subject.twin.chart.last("reward")
    assert abs(gain) < 0.15


@by_name
def test_the_bug_is_gone_after_the_block(patient):
    def state() -> list:
        names = [dict(vars(module)) for module in (grpo, objective, logprobs, sampling, Arithmetic)]
        functions = {f for module in names for f in module.values() if inspect.isfunction(f)}
        return [*names, {f: inspect.unwrap(f).__code__ for f in functions}]

    before = state()
    with patient.switch():
        changed = state() != before
    assert changed or patient.bug_settings or patient.name == "healthy"
    assert state() == before


@by_name
def test_a_record_is_complete(patient):
    for text in (patient.ward, patient.what, patient.sign, patient.cure, patient.harm):
        assert text and not text.endswith(".") and not text.startswith(" ")
    assert patient.seen in {"shipped", "caught in review", "reported", "a relative", "none"}
    if patient.seen == "none":
        assert provenance(patient) == "we know of no public thread"
    else:
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", patient.link)
        assert patient.shows and patient.link in provenance(patient)


def test_28_patients_have_24_diagnoses_and_16_more_have_no_patient_by_day():
    assert len(PATIENTS) == 28 and len({one.name for one in PATIENTS}) == 24
    assert {one.name for one in PATIENTS} < set(names()) and len(DECOYS) == 16
    assert len(names()) == 40 and list(names()) == sorted(names(), key=str.lower)
    wards = [notes["ward"] for notes in notes_by_diagnosis().values()]
    assert all(wards.count(ward) > 1 for ward in wards)
    assert sorted(one.name for one in numbered()) == sorted(one.name for one in PATIENTS)
    assert [one.name for one in numbered()] != [one.name for one in PATIENTS]


def test_diagnoses_are_named_by_what_is_seen(capsys):
    def printed(*word):
        clinic.diagnoses(*word)
        return capsys.readouterr().out

    numbers = [int(n) for n in re.findall(r"^ +(\d+)  ", printed("all"), re.M)]
    assert sorted(numbers) == [*range(1, 41)] and printed() == printed("...")
    assert sum(int(n) for n in re.findall(r" (\d+)$", printed(), re.M)) == 40
    assert printed("Flat").count("\n") == 8 and "k1 as the loss" not in printed("Flat")
    assert "called 'flu'" in printed("flu")


def test_settings_tell_nothing_patients_share_them():
    for setting in {id(one.setting): one.setting for one in PATIENTS}.values():
        sharing = [one for one in PATIENTS if one.setting is setting]
        assert len(sharing) >= 3 and any(one.name == "healthy" for one in sharing), setting.told
        assert len({str(one.config(sick=False)) for one in sharing}) == 1
    own = re.compile("level|estimator|lr|learning rate|eos|temperature")
    for case in map(clinic.patient, range(1, 29)):
        head = str(case).split("\n\n")[0]
        assert not own.search(head.replace("letters", "")), head


@pytest.mark.parametrize("number", range(1, 29))
def test_nothing_gives_the_name_away_before_the_diagnosis(number, monkeypatch):
    monkeypatch.setattr(diagnosis, "BUDGET", len(MEASUREMENTS))
    case = clinic.patient(number)
    one = case.patient.patient
    shown = str(case) + repr(case) + case.measurement()
    for name in MEASUREMENTS:
        shown += case.measurement(name)
    for text in (one.name, one.what, one.sign, one.cure, one.key or one.name):
        if text != "healthy":  # the twin is called so
            assert text.lower() not in shown.lower()


def test_every_patient_shows_the_same_rows():
    def rows(number: int) -> list[str]:
        table = str(clinic.patient(number)).split("\n\n")[1].splitlines()[1:]
        return [re.split(r"  +", line)[0] for line in table if not line.startswith("The patient")]

    assert len({tuple(rows(number)) for number in range(1, 29)}) == 1


def test_where_only_one_of_the_two_can_be_measured_the_other_is_shown():
    case = case_of(clinic.record("a sampler that does not know the end"))
    text = case.measurement("loss by hand")
    assert "patient 10: Nothing to measure here" in text and "logged loss" in text
    text = case_of(clinic.record("0 divided by 0")).measurement("transcripts")
    assert "patient 3: The run stopped" in text and "healthy twin:\n" in text


def test_a_measurement_that_finds_nothing_in_the_patient_is_free():
    case = case_of(clinic.record("a policy that grades its own samples"))
    assert "nothing here, so it's free; 3 of 3" in case.measurement("held-out accuracy")
    case = case_of(clinic.record("0 divided by 0"))
    for name in ("transcripts", "groups"):
        assert "it's free; 3 of 3" in case.measurement(name) and case.measured == []
    assert "it's free" not in case.measurement("scorer against sampler") and len(case.measured) == 1


def test_dots_and_a_measurement_that_does_not_exist_are_free():
    case = clinic.patient(1)
    said = case.measurement("...")
    assert said == "Patient 1: 3 of 3 left. case.measure() lists them."
    assert "have names, and 2 is none" in case.measurement(2)
    assert all(f'"{name}"' in case.measurement() for name in MEASUREMENTS)
    assert "Did you mean 'transcripts'?" in case.measurement("transcript")
    assert case.measurement("qqq").endswith("called 'qqq'. case.measure() lists them.")
    assert case.measured == []


@pytest.mark.parametrize("number", [0, 29, -1, 1.5, 2.0, "7", True])
def test_a_patient_that_does_not_exist(number):
    with pytest.raises(ValueError, match=f"number: expected 1 to 28, got {number!r}"):
        clinic.patient(number)


def case_of(patient: Patient) -> Case:
    return clinic.patient(numbered().index(patient) + 1)


@by_name
def test_the_right_diagnosis_is_told_everything_by_number_or_name(patient):
    case = case_of(patient)
    number = names().index(patient.name) + 1
    for answer in (number, str(number), patient.name.upper()):
        text = case.judged(answer)
        assert f": {patient.name}. Right." in text and "Your first answer" not in text
        for told in (patient.what, patient.sign, patient.cure, patient.harm):
            assert told in text
        assert provenance(patient) in text
        assert patient.question in text


@by_name
def test_a_wrong_diagnosis_never_names_the_right_one(patient):
    case = case_of(patient)
    same_task = [one for one in PATIENTS if one.setting is patient.setting]
    for other in {one.name for one in same_task} - {patient.name}:
        text = case.judged(other)
        assert f"{other!r} isn't it." in text
        assert patient.name not in text.replace("healthy twin", "")
        if other != "healthy":
            assert clinic.record(other).sign in text


def test_a_wrong_diagnosis_is_told_the_numbers_that_speak_against_it():
    told = set()
    for name in ("k1 as the loss", "0 divided by 0"):
        case = case_of(clinic.record(name))
        for other in ILL:
            at = other.sign_read
            if other.name == name:
                continue
            here, twin = (read(subject, other) for subject in (case.patient, case.twin))
            if math.isnan(here):
                why = "There is nothing of that to measure here."
            elif not at.fits(here):
                why = f"With that bug it's {'above' if at.above else 'below'} {at.threshold:g}."
            else:
                why = "On this task the" if at.fits(twin) else "It fits, but something else"
            numbers = [diagnosis._or_none(value) for value in (here, twin)]
            text = "{}: {} here, {} in the twin. {}".format(at.reading, *numbers, why)
            assert text in case.judged(other.name)
            told.add(why[:24])
    assert len(told) == 5  # there is a case of each


@pytest.mark.parametrize("decoy", DECOYS)
def test_a_diagnosis_that_nobody_has_is_told_its_sign_and_that_it_isnt_here(decoy):
    for number in (7, 9):
        case = clinic.patient(number)
        text = case.judged(decoy)
        assert notes_by_diagnosis()[decoy]["sign"] in text
        assert "That isn't what this patient has." in text
        assert case.patient.patient.name not in text and case._answer == decoy


def test_who_looks_first_is_told_that_it_takes_a_training(capsys):
    case = clinic.patient(7)
    str(case), str(case)
    assert capsys.readouterr().out.count("its twin are trained first") == 1


def test_the_evidence_says_when_its_measurement_was_not_taken(tmp_path, monkeypatch):
    case = case_of(clinic.record("EOS masked out"))
    case.measurement("transcripts")
    assert 'In "gradient per token" (not taken), ' in case.judged("EOS masked out")
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "another.db"))
    diagnosis.patient.cache_clear()
    case_of(clinic.record("EOS masked out")).measurement("gradient per token")
    diagnosis.patient.cache_clear()  # in another kernel nothing but the file is left
    case = case_of(clinic.record("EOS masked out"))
    assert 'In "gradient per token", ' in case.judged("EOS masked out")


@pytest.mark.parametrize("gives_up", [False, True])
def test_the_first_answer_counts_and_giving_up_is_one(gives_up, capsys):
    case = case_of(clinic.record("k1 as the loss"))
    case.measurement("transcripts")
    case.reveal() if gives_up else case.diagnose("healthy")
    assert ("k1 as the loss" in capsys.readouterr().out) == gives_up
    case.measure("groups")
    capsys.readouterr()
    case.diagnose("k1 as the loss")
    printed = capsys.readouterr().out
    assert "Right." in printed and "Your first answer counts" in printed
    assert gives_up or "Your first answer counts, and it was 'healthy'." in printed
    clinic.tally()
    assert "1 of 28 patients diagnosed, 0 right" in capsys.readouterr().out
    assert progress.recall("clinic")[str(case.number)]["measured"] == ["transcripts"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("...", "waits for a diagnosis"),
        ("", "waits for a diagnosis"),
        ("k1 as a loss", "Did you mean 'k1 as the loss'?"),
        ("qqqq", "No diagnosis is called 'qqqq'. clinic.diagnoses()"),
        (41, "the numbers 1 to 40"),
        ("99", "the numbers 1 to 40"),
        *((no, f"No diagnosis is called {no!r}. clinic.diag") for no in (None, 12.0, True, "²")),
    ],
)
def test_what_is_no_diagnosis_is_told_so_and_not_counted(answer, words):
    case = clinic.patient(7)
    assert words in case.judged(answer)
    assert progress.recall("clinic") == {} and case._answer is None


def test_the_table_holds_every_symptom_cause_measurement_and_cure():
    table = clinic.table()
    for one in ILL:
        assert f"<td>{one.name}</td>" in table
        assert f"<td>{one.sign_read.measurement.replace('dashboard', 'chart')}</td>" in table
        assert all(html.escape(text) in table for text in (one.ward, one.sign, one.cure))
        assert f"({one.sign_read.reading}" not in table  # nor our thresholds
    assert table.count("<tr>") == len(ILL) + 1
    spans = [int(n) for n in re.findall(r'rowspan="(\d+)"', table)]
    assert sum(spans) == len(ILL) == 23


@pytest.mark.parametrize("how", ["sequence_mean", "constant"])
def test_healthy_code_passes_under_other_settings_too(how):
    """The tests are for the reader's loop, whose settings are not those of the clinic."""
    for test in {one.test for one in ILL}:
        ask(*test, config=replace(clinic.SHORT, temperature=0.7, how=how, check=True))


def test_a_wrong_answer_says_where_to_look_and_that_measuring_is_free_now():
    number = [one.name for one in numbered()].index("k1 as the loss") + 1
    for wrong in ("healthy", "dropout left on while scoring"):
        said = Case(number, clinic.patient(number).patient).judged(wrong)
        assert 'Look at "gradient at zero advantage".' in said, said
        assert said.endswith("This patient's measurements are free now.")
