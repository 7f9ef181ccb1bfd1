"""Measurements: each runs on every patient, shows the same lines, and says what it should."""

import math
from types import SimpleNamespace

import clinic_page
import pytest
from test_clinic_page import DATA, alike

from minigrpo import clinic
from minigrpo.arithmetic import to_text
from minigrpo.clinic.charts import Chart, dashboard, shown, side_by_side
from minigrpo.clinic.measure import MEASUREMENTS, Subject, reading
from minigrpo.clinic.patients import PATIENTS, numbered, record, where_it_hurts

FIRST = "the loop's own ratio, farthest from 1 in batch 1"


def subject_of(name: str) -> Subject:
    return clinic.patient(numbered().index(record(name)) + 1).patient


@pytest.mark.parametrize("patient", PATIENTS, ids=lambda p: p.key or p.name)
def test_each_measurement_runs_on_every_patient(patient):
    """Random ids under the mask change the loss of one of them alone."""
    subject = clinic.patient(numbered().index(patient) + 1).patient
    for name in MEASUREMENTS:
        here, twin = (MEASUREMENTS[name][1](s) for s in (subject, subject.twin))
        if name != "transcripts" and isinstance(here, dict) and isinstance(twin, dict):
            assert list(here) == list(twin)
            assert len(side_by_side({"patient": here, "twin": twin}).splitlines()) <= 12
    changed = reading(subject, "exchange tests", "loss, random ids under the mask (change)")
    assert math.isfinite(changed)
    assert (changed > 1e-4) == (patient.name == "the mask in the denominator only")


def of(name: str, measurement: str, line: str) -> tuple[float, float]:
    subject = subject_of(name)
    return tuple(reading(s, measurement, line) for s in (subject, subject.twin))


def test_a_bug_that_scores_the_batch_again_hides_from_the_ratios():
    """So its sign is another, the difference to the sampler's own log-probs."""
    off = of("logits not shifted", "scorer against sampler", FIRST)
    assert max(off) < 1e-3


def test_old_log_probs_that_are_late_are_those_of_the_right_scorer():
    here, _ = of("stale old log-probs", "scorer against sampler", "largest difference (nats)")
    assert here < 1e-3
    off = of("stale old log-probs", "scorer against sampler", FIRST)
    assert max(off) < 1e-3


def test_top_p_leaves_the_mass_it_kept_and_a_temperature_goes_both_ways():
    low = "smallest of scorer's / sampler's probability"
    high = "largest of scorer's / sampler's probability"
    assert of("top-p in the sampler only", "scorer against sampler", high)[0] < 1.001
    assert of("a temperature in the sampler only", "scorer against sampler", low)[0] < 0.9
    assert of("a temperature in the sampler only", "scorer against sampler", high)[0] > 1.1


def test_the_loss_by_hand_tells_eos_from_micro_batches():
    eos = MEASUREMENTS["loss by hand"][1](subject_of("EOS masked out"))
    assert abs(eos["logged loss"] - eos["by hand, without each row's last token"]) < 1e-5
    parts = MEASUREMENTS["loss by hand"][1](subject_of("a token mean per micro-batch"))
    rows = [parts[n] for n in ("logged loss", "by hand, mean over micro-batches of 8 rows")]
    assert abs(rows[0] - rows[1]) < 1e-5 and shown(rows[0]) == shown(rows[1]) == "-0.1046"
    for found in (eos, parts):
        assert found["from the logged loss to the one over all tokens"] > 1e-3


def test_the_wrong_side_of_the_clip_is_seen_at_the_other_ratio_too():
    here, twin = of("the clip on the wrong side", "gradient per token", "A = -1, ratio 1.5")
    assert here == 0 and twin > 0


def test_a_kl_that_does_not_look_at_the_reference_is_told_from_a_reference_that_moves_along():
    """By more than rounding: with another reference the second would change, as the twin's does."""
    (here, twin), (same, other) = (
        of("a KL that uses the policy ratio", "exchange tests", f"KL, with {which} reference")
        for which in ("the", "another")
    )
    assert here == same and other > 1.5 * twin > 1e-4


def test_rows_of_one_group_with_the_same_reward_are_all_in_the_transcripts():
    subject = subject_of("old log-probs not detached")
    m, lines = subject.chart.steps[-1], MEASUREMENTS["transcripts"][1](subject).splitlines()
    written = m.rollouts.unpadded(m.rollouts.completions)
    assert m.rewards[0] == m.rewards[1] and len(lines) == 5
    assert [line.split("   ")[-1] for line in lines[1:3]] == [*map(to_text, written[:2])]


def test_a_held_out_question_asks_the_patient_that_reads_the_prompt():
    name = "held-out accuracy"
    here, twin = of("a reward that reads the prompt", name, f"{name}, after the run")
    assert here < twin - 0.1


def test_a_dashboard_shows_the_first_step_and_the_mean_of_the_last_three():
    metrics = "reward entropy grad_norm mean_length truncated loss".split()
    steps = [
        SimpleNamespace(**dict.fromkeys(metrics, n), kl=None, clip_low=n, clip_high=10 * n)
        for n in (1.0, 2.0, 4.0, 6.0, 11.0)
    ]
    found = dashboard(Chart(steps, None, 0.0))
    assert found.pop("steps done") == 5
    assert found.pop("clipped (clip_ratio/region_mean)") == (11, 77)  # both sides
    assert all(map(math.isnan, found.pop("KL to the reference (kl)")))
    assert len(found) == len(metrics) and {*found.values()} == {(1, 7)}
    found = dashboard(Chart([], None, 0.0))
    assert found.pop("steps done") == 0
    assert all(math.isnan(number) for pair in found.values() for number in pair)


def test_numbers_are_shown_as_a_table_needs_them():
    assert [shown(x) for x in (math.nan, 0.0, 12, 1.0, 0.99999, 13.46, 0.12345, 3e-7, 250.4)] == [
        "-", "0", "12", "1.000", "1.000", "13.46", "0.1235", "3e-07", "250.4",
    ]  # fmt: skip
    table = side_by_side({"one": {"a": 1, "long name": 0.5}, "two": {"a": 2, "long name": 5.0}})
    assert table.splitlines()[1:] == ["a               1      2", "long name  0.5000  5.000"]


def test_a_masked_end_hurts_where_stopping_has_to_be_learned():
    runs = where_it_hurts("EOS masked out", seeds=(0,))
    sick, twin = (sum(m.truncated for m in runs[who][0].steps[2:8]) for who in runs)
    assert list(runs) == ["with the bug", "healthy twin"] and sick > 1.3 * twin > 0


@pytest.mark.parametrize("number", range(1, 29))
def test_the_page_in_the_browser_shows_what_is_measured_today(number):
    assert alike(clinic_page.patient(number), DATA["patients"][number - 1])
