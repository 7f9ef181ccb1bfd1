"""The night shift: all is stored, half a point for one of two, and nothing gives a name away."""

from __future__ import annotations

import pytest
import text_runs

from minigrpo import clinic
from minigrpo.clinic.nights import Arrival, stored
from minigrpo.clinic.patients import names, records
from minigrpo.notebook import progress

RECORDS = {k: v | {"has": v["has"].split("; ")} for k, v in records("night.md").items()}
each = pytest.mark.parametrize("name", RECORDS)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "progress.db"))


def test_what_is_told_run_and_stored_are_the_same_twelve():
    assert [*RECORDS] == [*text_runs.NIGHT] == [*stored()] and len(RECORDS) == 12
    has = [name for about in RECORDS.values() for name in about["has"]]
    assert {*has} <= {*names()} and has.count("healthy") == 2 and len(has) == 14
    shows = [about["shows"] for about in RECORDS.values()]
    assert shows.count("log") == shows.count("transcript") == 4


@each
def test_what_is_shown_names_no_diagnosis(name, capsys):
    Arrival(1, name).show()
    printed = capsys.readouterr().out.lower()
    for diagnosis in RECORDS[name]["has"]:
        assert diagnosis.lower() not in printed
    assert name not in printed and name not in repr(Arrival(1, name))


@each
def test_the_right_answer_is_a_point_and_the_first_one_counts(name):
    has, arrival = RECORDS[name]["has"], Arrival(3, name)
    said = arrival.judged(*(names().index(one) + 1 for one in has))
    assert "1 of 1 point." in said and RECORDS[name]["tell"] in said and "Your first" not in said
    assert "Your first answer counts, and it had 1." in arrival.judged("logits not shifted")
    assert progress.clinic_line().endswith(" The night shift: 1 of 1.")


def test_one_of_two_is_half_a_point_either_way():
    two, one = Arrival(1, "two starts"), Arrival(2, "nine tenths")
    assert "0.5 of 1 point." in two.judged("a double BOS from the chat template", "healthy")
    assert "0.5 of 1 point." in one.judged("top-p in the sampler only", "k1 as the loss")
    assert "0 of 1 point." in Arrival(3, "noise").judged("k1 as the loss")


@pytest.mark.parametrize("answers", [(), ("...",), (1, 2, 3), ("flu",), (99,)])
def test_what_is_no_answer_is_not_counted(answers):
    said = Arrival(5, "noise").judged(*answers)
    assert "waits for" in said or "clinic.diagnoses()" in said or "1 to 37" in said
    assert progress.recall("clinic") == {}


def test_a_seed_shuffles_them_and_each_comes_once():
    orders = [[clinic.night(place, seed).name for place in range(1, 13)] for seed in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == sorted(RECORDS)
    with pytest.raises(ValueError, match="place: expected 1 to 12, got 13"):
        clinic.night(13)


def signs(name: str) -> dict[str, list[float]]:
    return stored()[name]["curve"]


def test_the_evidence_holds_what_decides():
    ratio, away = "sampling/importance_sampling_ratio/", "sampling/sampling_logp_difference/mean"
    assert max(signs("nine tenths")[ratio + "max"]) < 1.0001
    healthy = signs("coarse engine")
    assert min(healthy[ratio + "min"]) < 0.9 and max(healthy[ratio + "max"]) > 1.1
    assert healthy[away][0] > 0 and sum(healthy[ratio + "mean"]) < len(healthy["reward"])
    assert signs("never synced")[away][0] < 1e-4 < 0.2 < signs("never synced")[away][-1]
    eight = signs("eight tokens")
    assert eight["kl"][0] > 1 and eight["completions/clipped_ratio"][-1] > 0.3
    assert signs("less than nothing")["reward"][0] < 0
    fast = signs("too fast")["reward"]
    assert max(fast[:20]) > 0.7 and sum(fast[-20:]) < 6
    rows = {name: run["rows"] for name, run in stored().items() if "rows" in run}
    assert all(p.count("<|user|>") == 2 for p, *_ in rows["chat in a chat"])
    assert all(w.count("<|endoftext|>") > 1 for _, w, _ in rows["pad for end"])
    assert all(p.startswith("<s> <s> ") for p, *_ in rows["two starts"])
