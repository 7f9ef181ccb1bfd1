"""The sweep behind the last section of notebook 03: what is stored is what the settings say."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import Pool

from minigrpo.gpt import load_gpt
from minigrpo.objective import grpo_loss

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import reuse  # noqa: E402


def test_every_run_is_stored_with_the_present_settings():
    """A change of settings or of the starting weights empties the table until it is run again."""
    assert [reuse.name(one) for one in reuse.stored()] == reuse.RUNS
    for one in reuse.stored():
        assert len(one["reward"]) == len(one["clipped"]) == reuse.STEPS
        assert one["clipped"][0] == 0 or one["epochs"] > 1


def test_runs_of_other_settings_are_not_taken_for_stored(tmp_path, monkeypatch):
    changed = json.loads(reuse.PATH.read_text("utf-8"))
    changed["settings"]["config"]["group_size"] = 8
    (tmp_path / "reuse.json").write_text(json.dumps(changed), "utf-8")
    monkeypatch.setattr(reuse, "PATH", tmp_path / "reuse.json")
    assert reuse.stored() == []


@pytest.mark.parametrize("arm", reuse.ARMS)
def test_with_one_pass_the_kind_of_ratio_does_not_matter(arm):
    """The claim of the notebook: same direction, whatever the level, if all lengths are equal."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 9, dtype=torch.float64, generator=generator)
    advantages, mask = torch.randn(6, dtype=torch.float64, generator=generator), torch.ones(6, 9)
    plain, new = old.clone().requires_grad_(), old.clone().requires_grad_()
    (-(advantages[:, None] * plain).mean()).backward()  # REINFORCE
    settings = {"clip": (0.2, 0.2), **reuse.ARMS[arm]}
    grpo_loss(new, old, advantages, mask, **settings)[0].backward()
    cosine = torch.cosine_similarity(new.grad.flatten(), plain.grad.flatten(), dim=0)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


def test_a_range_without_a_bound_never_clips():
    old, advantages = torch.zeros(2, 1), torch.tensor([1.0, -1.0])
    new = torch.tensor([[12.0], [-12.0]], requires_grad=True)  # ratios far from 1
    loss, metrics = grpo_loss(
        new, old, advantages, torch.ones(2, 1), **reuse.ARMS["token, no clip"]
    )
    loss.backward()
    assert metrics["clip_ratio/region_mean"] == 0 and new.grad.count_nonzero() == 2


@pytest.mark.parametrize("one", [reuse.RUNS[0], reuse.Run("geometric", 128, 8, 1e-3, 2)])
def test_a_run_is_what_its_name_says(one):
    config = reuse.config(one)
    assert (config.max_new_tokens, config.inner_epochs, config.lr, config.seed) == one[1:]
    assert reuse.ARMS[one.arm].items() <= vars(config).items()


def test_a_run_repeats_itself_and_begins_as_the_stored_one_did():
    base = load_gpt(reuse.BASE).eval()
    one = reuse.Run("product", 24, 2, 3e-4, 0)
    steps = reuse.run(base, one), reuse.run(base, one)
    first, again = (next(s) for s in steps)
    assert first.reward == again.reward and first.grad_norm == again.grad_norm
    (then,) = (run for run in reuse.stored() if reuse.name(run) == one)
    assert first.reward == pytest.approx(then["reward"][0], abs=0.01)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_measurement_has_the_rewards_and_both_sides_of_the_clip(epochs, monkeypatch):
    """The clipped fraction of a step is the mean over its updates, of which the first has none."""
    monkeypatch.setattr(reuse, "STEPS", 2)
    one, kept = reuse.Run("token", 24, epochs, 1e-3, 0), []
    real = reuse.run

    def noted(base, one):
        for m in real(base, one):
            kept.append(m)
            yield m

    monkeypatch.setattr(reuse, "run", noted)
    found = reuse.measure(one)
    assert reuse.name(found) == one
    assert found["reward"] == [round(m.rewards.mean().item(), 4) for m in kept]
    sides = [(m.clip_low, m.clip_high) for m in kept]
    assert found["clipped"] == [pytest.approx(sum(both), abs=1e-4) for both in sides]
    assert all(min(both) > 0 for both in sides) == (epochs > 1)
    assert found["seconds"] == round(sum(m.seconds for m in kept), 1)


def test_what_is_missing_is_measured_and_again_is_all_of_it(tmp_path, monkeypatch, capsys):
    runs, measured = reuse.stored(), []
    known = {reuse.name(one): one for one in runs}
    monkeypatch.setattr(reuse, "PATH", tmp_path / "reuse.json")
    context = SimpleNamespace(Pool=Pool)
    monkeypatch.setattr(reuse.multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(reuse, "measure", lambda one: measured.append(one) or known[one])
    reuse.save(runs[:0:-1])  # all but the first, in another order
    assert reuse.stored() == runs[1:]
    reuse.main([])
    assert measured == reuse.RUNS[:1] and reuse.stored() == runs
    said = f"reward {runs[0]['reward'][-1]:.2f}"
    assert capsys.readouterr().out.splitlines() == [f"{' '.join(map(str, reuse.RUNS[0]))} {said}"]
    reuse.main(["--again"])
    assert measured[1:] == reuse.RUNS and reuse.stored() == runs
