"""The night shift: all is stored, half a point for one of two, and nothing gives a name away."""

import re
from itertools import product

import pytest
import text_runs
import torch

from minigrpo import clinic
from minigrpo.clinic.nights import EXAMPLE, Arrival, stored
from minigrpo.clinic.patients import names, records
from minigrpo.notebook import progress

RECORDS = {k: v | {"has": v["has"].split("; ")} for k, v in records("night.md").items()}
TOOL = {name: about for name, about in RECORDS.items() if name.startswith("open build")}
each = pytest.mark.parametrize("name", RECORDS)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGRPO_PROGRESS", str(tmp_path / "progress.db"))


def test_what_is_told_run_and_stored_are_the_same_twelve_five_with_a_tool_and_an_example():
    assert [*RECORDS] == [*text_runs.NIGHT] == [*stored()] and len(TOOL) == 5
    others = [about for name, about in RECORDS.items() if name not in TOOL]
    has = [name for about in others for name in about["has"]]
    assert {*has} <= {*names()} and has.count("healthy") == 2 and len(has) == 17
    shows = [about["shows"].split()[0] for about in others]
    assert shows.count("page") == 3 and {*shows} == {"log", "chart", "page"}


@pytest.mark.parametrize("name", TOOL)
def test_the_page_alone_tells_what_the_one_with_a_tool_has(name):
    one, other = RECORDS[name], TOOL["open build 5"]
    assert all(one[key] == other[key] for key in ("told", "setup", "shows", "rows"))
    assert stored()[name]["config"] == stored()["open build 5"]["config"]
    rows = [stored()[name]["rows"][int(row)] for row in one["which"].split()]
    off = [abs(row["trainer"] - row["engine"]) > 0.005 for _, _, row in rows]
    two_digits = [bool(re.search(r"1\d", text)) for _, text, _ in rows]
    right = {(prompt, text.split()[-3]) for prompt, text, row in rows if row["reward"]}
    fits = {
        "the loss's mask used for attention": off == ["</call>" in text for _, text, _ in rows],
        "text tokenized again before scoring": off == two_digits,
        "a temperature in the sampler only": all(off),
        "a reward that believes forged tool results": len(right) > 2,
        "healthy": not any(off) and len(right) == 2,
    }
    assert [bug for bug, fit in fits.items() if fit] == one["has"]


@each
def test_what_is_shown_names_no_diagnosis(name, capsys):
    Arrival(1, name).show()
    printed = capsys.readouterr().out.lower()
    for diagnosis in RECORDS[name]["has"]:
        assert diagnosis.lower() not in printed
    assert name not in printed + repr(Arrival(1, name))


@each
def test_the_right_answer_is_a_point_and_the_first_one_counts(name):
    has, arrival = RECORDS[name]["has"], Arrival(3, name)
    said = arrival.judged(*(names().index(one) + 1 for one in has))
    assert "1 of 1 point." in said and RECORDS[name]["tell"] in said and "Your first" not in said
    again = arrival.judged("logits not shifted")
    assert "You said logits not shifted: 0 of 1 point. Your first answer counts, and it" in again
    assert progress.clinic_line().endswith(" The night shift: 1 of 1.")


def test_one_of_two_is_half_a_point_either_way_and_the_example_is_not_counted():
    two, one = Arrival(1, "two starts"), Arrival(2, "low tide")
    assert "0.5 of 1 point." in two.judged("a double BOS from the chat template", "healthy")
    wrong = "an entropy bonus with the wrong sign", "k1 as the loss"
    assert "0.5 of 1 point." in one.judged(*wrong)
    assert "0 of 1 point." in clinic.night(0).judged("k1 as the loss")
    assert repr(progress.progress()).endswith(" The night shift: 1 of 2.")


@pytest.mark.parametrize("answers", [(), ("...",), (1, 2, 3), ("flu",), (99,)])
def test_what_is_no_answer_is_not_counted(answers):
    said = Arrival(5, "leaps").judged(*answers)
    assert "waits for" in said or "clinic.diagnoses()" in said or "1 to 40" in said
    assert progress.recall("clinic") == {}


def test_a_seed_shuffles_them_and_draws_the_one_with_a_tool():
    nights = [[clinic.night(place, seed)._name for place in range(14)] for seed in range(9)]
    drawn = [[name for name in night if name in TOOL] for night in nights]
    assert all(len(one) == 1 for one in drawn) and len({*sum(drawn, [])}) > 3
    assert all({*night} == {*RECORDS} - {*TOOL} | {*one} for night, one in zip(nights, drawn))
    assert {night[0] for night in nights} == {EXAMPLE} and len({*map(tuple, nights)}) == 9
    for place in (14, 1.0):
        with pytest.raises(ValueError, match=f"place: expected 1 to 13, got {place}"):
            clinic.night(place)


def curve(name: str) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(values) for key, values in stored()[name]["curve"].items()}


def by_hand(rows: list[list], without_end: bool, by_pass: bool) -> float:
    """The loss of a batch of groups of eight."""
    reward, tokens = (torch.tensor([row[2][name] for row in rows]) for name in ("reward", "tokens"))
    ends = torch.tensor([row[1].endswith("\n") for row in rows])
    groups, tokens = reward.view(-1, 8), (tokens - without_end * ends.int()).view(-1, 8)
    A = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    if by_pass:
        return -((A * tokens).sum(1) / tokens.sum(1)).mean().item()
    return -((A * tokens).sum() / tokens.sum()).item()


def test_the_loss_of_a_batch_can_be_worked_out():
    rows, logged = stored()["short measure"]["rows"], curve("short measure")["loss"][-1].item()
    losses = [by_hand(rows, *bugs) for bugs in product((False, True), repeat=2)]
    assert [abs(loss - logged) < 1e-3 for loss in losses] == [False, False, False, True]
    assert all(f"{loss:.3f}" in RECORDS["short measure"]["tell"] for loss in losses)


def test_a_loss_holds_what_decides():
    low, late, down = map(curve, ("low tide", "one late", "downhill"))
    equal = low["reward"][-8:] == 1
    assert equal.sum() > 5 and (low["loss"][-8:][equal] > 2e-4).all() and low["grad_norm"].min() > 0
    assert late["loss"][0].abs() < 1e-6 and late["loss"][1:8].max() < -0.005
    assert down["kl"][0].abs() < 1e-6 and max(down["kl"][1], down["loss"][1]) < -0.003
    assert down["loss"][1:6].max() < 0 < down["kl"][[2, 4, 5]].min()


def test_the_logs_hold_what_decides():
    coarse, ratio = curve("coarse engine"), "sampling/importance_sampling_ratio/"
    assert coarse["sampling/sampling_logp_difference/mean"][0] > 0.005
    assert all(abs(part.mean() - 1) < 0.01 for part in coarse[ratio + "mean"][1:].split(17))
    assert coarse[ratio + "max"].median() > 1.1 and coarse[ratio + "min"].median() < 0.95
    stairs = curve("now and then")["reward"][:128].view(-1, 16).mean(1)
    assert (stairs[[1, 4, 6]] - stairs[[0, 3, 5]]).abs().max() < 0.06
    assert (stairs[[2, 3, 5]] - stairs[[1, 2, 4]] > 0.2).all()
    shadow, other = curve("own shadow"), curve("other order")
    assert shadow["kl"][0] > 0.003 > 5 * shadow["kl"][-40:].mean() > 0 and other["kl"].max() == 0
    assert abs(other["reward"][-60:].mean() - 0.325) < 0.02 < 0.9 < shadow["reward"][-40:].mean()
    uphill, kl, length = curve("uphill").values()
    assert uphill[:5].mean() > 0.15 > 0.11 > uphill[-40:].mean() and kl.max() < 0.3
    assert length[:2].mean() > 6 > 5.5 > length[-40:].mean()
    eight, leaps = curve(EXAMPLE), curve("leaps")
    assert eight["kl"][0] > 0.1 and eight["completions/clipped_ratio"][-20:].mean() > 0.5
    assert leaps["kl"].max() > 2 > 20 * leaps["kl"].median() and leaps["reward"][40:].mean() > 0.9
    assert leaps["kl"].argmax() != (top := leaps["grad_norm"].argmax()) and leaps["kl"][top] < 0.2


def test_the_pages_hold_what_decides(capsys):
    for prompt, written, row in stored()["two starts"]["rows"]:
        assert (len(prompt.split()), row["prompt"]) == (21, 23) and "<s>" not in prompt
        assert ("<answer> 9" in written) == row["reward"]
    assert f"have {16 * 23} tokens" in RECORDS["two starts"]["told"]
    Arrival(1, "two readings").show()
    same: dict[str, list] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.endswith("<|endoftext|>'"):
            _, _, engine, trainer, written = line.split(maxsplit=4)
            same.setdefault(written, []).append((engine, trainer))
    pairs = [both for both in same.values() if len(both) > 1]
    assert [(len(both), len({engine for engine, _ in both})) for both in pairs] == [(2, 1)] * 2
    assert all(abs(float(one) - float(other)) > 0.01 for (_, one), (_, other) in pairs)
