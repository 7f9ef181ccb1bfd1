"""The sweep behind the last section of notebook 03: what is stored is what the settings say."""

import json
import sys
from pathlib import Path

import pytest
import torch

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
