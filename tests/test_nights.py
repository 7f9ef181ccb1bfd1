"""The night shift: all is stored, half a point for one of two, and nothing gives a name away."""

from __future__ import annotations

import pytest
import text_runs
import torch

from minigrpo import clinic
from minigrpo.clinic.nights import EXAMPLE, Arrival, stored
from minigrpo.clinic.patients import names, records
from minigrpo.notebook import progress

RECORDS = {k: v | {"has": v["has"].split("; ")} for k, v in records("night.md").items()}
each = pytest.mark.parametrize("name", RECORDS)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "progress.db"))


def test_what_is_told_run_and_stored_are_the_same_twelve_and_an_example():
    assert [*RECORDS] == [*text_runs.NIGHT] == [*stored()] and len({*RECORDS} - {EXAMPLE}) == 12
    has = [name for about in RECORDS.values() for name in about["has"]]
    assert {*has} <= {*names()} and has.count("healthy") == 4 and len(has) == 16
    shows = [about["shows"].split()[0] for about in RECORDS.values()]
    assert shows.count("transcript") == 1 and {*shows} == {"log", "chart", "batch", "transcript"}


@each
def test_what_is_shown_names_no_diagnosis(name, capsys):
    Arrival(1, name).show()
    Arrival(1, name).measure("groups")
    printed = capsys.readouterr().out.lower()
    for diagnosis in RECORDS[name]["has"]:
        assert diagnosis.lower() not in printed
    assert printed.endswith("nothing more can be measured.\n")
    said = repr(Arrival(1, name))
    assert name not in printed + said and said.endswith("arrival.show() shows what came in.")


@each
def test_the_right_answer_is_a_point_and_the_first_one_counts(name):
    has, arrival = RECORDS[name]["has"], Arrival(3, name)
    said = arrival.judged(*(names().index(one) + 1 for one in has))
    assert "1 of 1 point." in said and RECORDS[name]["tell"] in said and "Your first" not in said
    again = arrival.judged("logits not shifted")
    assert "You said logits not shifted: 0 of 1 point. Your first answer counts, and it" in again
    assert progress.clinic_line().endswith(" The night shift: 1 of 1.")


def test_one_of_two_is_half_a_point_either_way_and_the_example_is_not_counted():
    two, one = Arrival(1, "two starts"), Arrival(2, "undertow")
    assert "0.5 of 1 point." in two.judged("a double BOS from the chat template", "healthy")
    wrong = "an entropy bonus with the wrong sign", "k1 as the loss"
    assert "0.5 of 1 point." in one.judged(*wrong)
    assert "0 of 1 point." in clinic.night(0).judged("k1 as the loss")
    assert progress.clinic_line().endswith(" The night shift: 1 of 2.")


@pytest.mark.parametrize("answers", [(), ("...",), (1, 2, 3), ("flu",), (99,)])
def test_what_is_no_answer_is_not_counted(answers):
    said = Arrival(5, "leaps").judged(*answers)
    assert "waits for" in said or "clinic.diagnoses()" in said or "1 to 37" in said
    assert progress.recall("clinic") == {}


def test_a_seed_shuffles_them_and_each_comes_once():
    orders = [[clinic.night(place, seed)._name for place in range(13)] for seed in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == sorted(RECORDS)
    assert orders[0][0] == orders[1][0] == EXAMPLE
    with pytest.raises(ValueError, match="place: expected 1 to 12, got 13"):
        clinic.night(13)


def signs(name: str) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(values) for key, values in stored()[name]["curve"].items()}


@pytest.mark.parametrize(("name", "sign"), [("afterglow", -1), ("undertow", 1)])
def test_where_all_groups_are_equal_the_bonus_shows_its_sign(name, sign):
    steps = signs(name)
    equal = steps["frac_reward_zero_std"][-8:] == 1
    left = (steps["loss"] / steps["entropy"])[-8:][equal]
    assert len(left) > 3 and torch.allclose(left, torch.tensor(sign * 0.1), rtol=0.1)


def by_hand(rows: list[list], less: float) -> float:
    """The loss of a batch of groups of eight; `less` of each end of a line is left out."""
    reward, tokens = (torch.tensor([float(row[at]) for row in rows]) for at in (2, 3))
    ends = torch.tensor([float(row[1].endswith("\n")) for row in rows])
    groups, tokens = reward.view(-1, 8), tokens - less * ends
    A = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return -((A.flatten() * tokens).sum() / tokens.sum()).item()


@pytest.mark.parametrize(("name", "less"), [("long lines", 0), ("last letters", 1)])
def test_the_loss_of_a_batch_can_be_worked_out(name, less):
    told = RECORDS[name]["tell"]
    logged = signs(name)["loss"][-1].item()
    here, other = (by_hand(stored()[name]["rows"], n) for n in (less, 1 - less))
    assert abs(here - logged) < 1e-3 < abs(other - logged)
    assert f"{here:.3f}" in told and f"{other:.3f}" in told


def test_the_logs_hold_what_decides():
    ratio, off = "sampling/importance_sampling_ratio/mean", "sampling/sampling_logp_difference/"
    coarse, warm = (
        [*signs(name)[ratio][10:].split(16)] for name in ("coarse engine", "warm sampler")
    )
    assert all(abs(part.mean() - 1) < 0.015 for part in coarse)
    assert all(part.mean() < 0.99 for part in warm) and signs("warm sampler")[off + "max"].max() > 1
    late = signs("one late")
    assert late["clip_ratio/region_mean"][0] == 0 < late["clip_ratio/region_mean"][1:23].mean()
    assert late[off + "mean"].max() < 1e-5
    never = signs("never synced")
    assert never["kl"][-40:].mean() > 0.3 and abs(never["reward"].mean() - 0.2) < 0.03
    other = signs("other order")
    assert other["kl"].max() < 0.01 and abs(other["reward"][-60:].mean() - 0.325) < 0.02
    assert signs("uphill")["reward"][:20].mean() < 0.15
    eight = signs(EXAMPLE)
    assert eight["kl"][0] > 0.1 and eight["completions/clipped_ratio"][-20:].mean() > 0.5
    leaps = signs("leaps")
    assert leaps["kl"].max() > 2 > 20 * leaps["kl"].median() and leaps["reward"][40:].mean() > 0.9
    rows = stored()["two starts"]["rows"]
    assert all(prompt.startswith("<s> <s> ") for prompt, *_ in rows)
    assert all(("<answer> 9" in written) == paid for _, written, paid, _ in rows)
