"""The runs behind notebook 10: what is stored is what the settings and the notebook say."""

import inspect
import json
import sys
from pathlib import Path

import nbformat
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import scaling_runs  # noqa: E402


def test_every_run_is_stored_with_the_present_settings():
    """A change of settings or of the starting weights empties the table until it is run again."""
    assert [scaling_runs.name(one) for one in scaling_runs.stored()] == scaling_runs.RUNS
    for one in scaling_runs.stored():
        steps, most = (12, 1) if one["what"] == "stale" else (scaling_runs.TRAINER_STEPS, 3)
        assert len(one["curve"]) == steps and 0 <= min(one["curve"]) and max(one["curve"]) <= most


def test_runs_of_other_settings_are_not_taken_for_stored(tmp_path, monkeypatch):
    changed = json.loads(scaling_runs.PATH.read_text("utf-8"))
    changed["settings"]["stale_steps"] = 8
    (tmp_path / "scaling.json").write_text(json.dumps(changed), "utf-8")
    monkeypatch.setattr(scaling_runs, "PATH", tmp_path / "scaling.json")
    assert scaling_runs.stored() == []


@pytest.mark.parametrize("function", ["score", "written_by", "stale_loss", "train_stale"])
def test_the_notebook_shows_what_was_run(function):
    nb = nbformat.read(ROOT / "notebooks" / "10_scaling_out.ipynb", as_version=4)
    code = "\n\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "code")
    assert inspect.getsource(getattr(scaling_runs, function)).strip() in code


def losses(behavior, proximal, new, advantage=1.0):
    """The loss of one token and its gradient in the log-prob, for each correction."""
    found = {}
    for correction in scaling_runs.CORRECTIONS:
        leaf = torch.tensor([[new]], dtype=torch.float64).log().requires_grad_()
        old = [torch.tensor([[p]], dtype=torch.float64).log() for p in (proximal, behavior)]
        mask = torch.ones(1, 1, dtype=torch.bool)
        loss = scaling_runs.stale_loss(correction, leaf, *old, torch.tensor([advantage]), mask)
        loss.backward()
        found[correction] = round(-leaf.grad.item(), 6)
    return found


def test_where_each_correction_clips():
    """A token at 0.1 when it was written, 0.2 before the update and at it."""
    assert losses(0.1, 0.2, 0.2) == {
        "none": 1.0,
        "behavior": 0.0,  # twice as likely: already beyond the clip
        "proximal": 1.0,
        "decoupled": 2.0,
    }
    assert losses(0.1, 0.5, 0.5)["decoupled"] == 2.0  # the cap
    assert losses(0.4, 0.2, 0.2)["decoupled"] == 0.5
    # Another pass over the batch has moved it by half.
    assert losses(0.1, 0.2, 0.3) == dict.fromkeys(("behavior", "proximal", "decoupled"), 0.0) | {
        "none": 1.0
    }
    assert losses(0.1, 0.2, 0.3, advantage=-1.0) == {
        "none": -1.0,
        "behavior": -3.0,
        "proximal": -1.5,
        "decoupled": -3.0,
    }


def test_a_run_repeats_itself():
    first = scaling_runs.train_stale(1, "decoupled", steps=2, every=1)
    assert first == scaling_runs.train_stale(1, "decoupled", steps=2, every=1) and len(first) == 2
