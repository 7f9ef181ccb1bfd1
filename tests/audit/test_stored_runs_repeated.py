"""Stored runs, repeated in part: the code of today begins as it did when they were measured."""

from dataclasses import replace
from functools import partial

import ppo
import pytest
import results
import reuse
import scaling_runs
import text_runs
import thinking
import torch
import turns

from minigrpo.llama import load_policy, tiny_llama
from minigrpo.scaling import run as scaling
from minigrpo.study.experiments import EXPERIMENTS, WARMUP, run, warm_up
from minigrpo.text.models import load_pretrained


@pytest.mark.parametrize("name", [results.SUMMIT_NAME, "KL weight 1", "reward for any thought"])
def test_an_experiment_begins_as_the_stored_one_did(name):
    """Ten steps of a hundred."""
    then = results.STORES[name].stored()[0]["curve"]
    points = list(run(EXPERIMENTS[name], load_policy(), seed=0, steps=10))
    for at, point in enumerate(points):
        for score in ("accuracy", "greedy", "thinking"):
            assert point.scores[score] == pytest.approx(then[score][at], abs=0.1), (at, score)
    assert points[0].scores["accuracy"] == pytest.approx(then["accuracy"][0], abs=0.01)


def test_grpo_beside_ppo_is_the_run_of_the_experiments():
    """The same seed, the same base: the accuracy that is stored for notebook 07."""
    summit = results.STORES[results.SUMMIT_NAME].stored()
    for one in ppo.COMPARED.stored():
        then = summit[one["seed"]]["curve"]["accuracy"]
        assert one["grpo"]["curve"]["accuracy"] == pytest.approx(then, abs=0.02)


def test_what_the_shipped_base_does_of_itself_is_what_is_stored():
    found = thinking.habits(load_policy())
    for one in thinking.store_of("flipped rewards", "0.3").stored():
        assert found == pytest.approx(one["base"], abs=0.01)


def test_the_dial_at_a_tenth_is_how_the_shipped_base_was_made():
    by_hand, shipped = tiny_llama(0), tiny_llama(0)
    next(iter(warm_up(by_hand, WARMUP, torn=0.1)))
    next(iter(warm_up(shipped, WARMUP)))
    assert all(torch.equal(a, b) for a, b in zip(by_hand.parameters(), shipped.parameters()))


@pytest.mark.parametrize("loss", ["plain", "clip"])
def test_a_run_of_the_sweep_begins_as_the_stored_one_did(loss, monkeypatch):
    """Three batches of twelve; the ratio alone is chaotic."""
    one = reuse.Run(loss, 2, "", 0)
    (then,) = (run for run in reuse.STORE.stored() if reuse.STORE.name(run) == one)
    monkeypatch.setattr(reuse, "BATCHES", 3)
    found = reuse.measure(one)
    assert found["reward"] == pytest.approx(then["reward"][:3], abs=0.02)
    assert found["nll"] == pytest.approx(then["nll"][:3], abs=0.05)
    assert found["text"][0] == then["text"][0]


@pytest.mark.parametrize(("arm", "steps"), [("llama", 5), ("chat, answer", 1)])
def test_a_text_model_begins_as_the_stored_one_did(arm, steps, monkeypatch):
    """What ships is careless, and five steps of reward make it more careful."""
    (then,) = (r["curve"] for r in text_runs.STORE.stored() if (r["arm"], r["seed"]) == (arm, 0))
    monkeypatch.setitem(text_runs.ARMS, arm, replace(text_runs.ARMS[arm], steps=steps))
    found = text_runs.measure(text_runs.Run(arm, 0))["curve"]
    assert found["step"] == [0, steps]
    for name in text_runs.SCORES:
        assert found[name][0] == pytest.approx(then[name][0], abs=0.01)
    for name in ("form", "right") if steps == then["step"][1] else ():
        assert found[name][1] == pytest.approx(then[name][1], abs=0.06)
        assert found[name][1] > found[name][0] + 0.07


def test_a_run_with_a_tool_begins_as_the_stored_one_did(monkeypatch):
    then = turns.store_of("the run").stored()[0]["curve"]
    monkeypatch.setattr(turns, "RUN", replace(turns.RUN, steps=10))
    found = turns.measure(turns.ARMS["the run"], turns.Seed(0))["curve"]
    for name in ("accuracy", "answered", "bits"):
        assert found[name] == pytest.approx(then[name][:2], abs=0.06), name


def test_a_run_of_the_night_shift_begins_as_the_stored_one_did(monkeypatch):
    (then,) = (r["curve"] for r in text_runs.NIGHT_STORE.stored() if r["name"] == "now and then")
    run = text_runs.NIGHT["now and then"]._replace(world=partial(text_runs.sums, steps=3))
    monkeypatch.setitem(text_runs.NIGHT, "now and then", run)
    found = text_runs.night(text_runs.NightRun("now and then"))["curve"]
    assert {*found} == {*then}
    for name in ("reward", "entropy", "kl"):
        assert found[name] == pytest.approx(then[name][:3], abs=0.05)


def test_a_stored_stale_run_is_what_the_code_gives():
    """The first ten of its sixty steps, on whatever processor this is."""
    wanted, shown = scaling_runs.Run("stale", 4, "per_token", 0), scaling_runs.SHOWN
    (one,) = (r for r in scaling_runs.STORE.stored() if scaling_runs.STORE.name(r) == wanted)
    found = shown["train"](shown["per_token"], age=4, steps=10)
    assert found == pytest.approx(one["curve"][:2], abs=0.1)


@pytest.mark.parametrize("trainer", [*scaling_runs.TRAINERS])
def test_the_command_trains_and_begins_as_the_stored_run_did(trainer, tmp_path, monkeypatch):
    if trainer == "TRL":
        pytest.importorskip("trl", reason="the extra `scale` is not installed")
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "run.pt"
    scaling.main([trainer.lower(), "--out", str(out), "--steps", "2", "--seed", "1"])
    result = torch.load(out, weights_only=True)
    (one,) = (r for r in scaling_runs.STORE.stored() if r["what"] == trainer and r["seed"] == 1)
    assert result["rewards"] == pytest.approx(one["curve"][:2], abs=0.1)
    before, after = load_pretrained(scaling_runs.BASES[0])[0].state_dict(), result["parameters"]
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_a_process_that_fails_is_quoted():
    with pytest.raises(RuntimeError, match="(?s)torchrun: failed, and wrote last:.*invalid choice"):
        scaling.torchrun(1, "nobody")
