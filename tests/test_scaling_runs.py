"""The runs behind notebook 10: what is stored is what the settings and the notebook say."""

import inspect
import json
import sys
import types
from pathlib import Path

import nbformat
import pytest
import torch
from support import Pool

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import scaling_runs  # noqa: E402

from minigrpo.grpo import GRPOConfig  # noqa: E402
from minigrpo.scaling import run  # noqa: E402
from minigrpo.text.models import load_pretrained  # noqa: E402


def test_every_run_is_stored_with_the_present_settings():
    """A change of settings, code or starting models empties the table until it is run again."""
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


def another_loss(*_):
    return 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRAINER_STEPS", 10),
        ("STALE_STEPS", 30),
        ("BASES", scaling_runs.BASES[:1]),
        ("stale_loss", another_loss),
        ("written_by", another_loss),
        ("train_stale", another_loss),
        ("QUIET", {**scaling_runs.QUIET, "bf16": True}),
        ("problem_rows", lambda: []),
        ("problem_config", lambda *_, steps: GRPOConfig(lr=1e-4, eos_id=0)),
    ],
)
def test_a_changed_setting_is_noticed(name, value, monkeypatch):
    scaling_runs.trainers.cache_clear()
    monkeypatch.setattr(scaling_runs, name, value)
    try:
        assert scaling_runs.stored() == []
    finally:
        scaling_runs.trainers.cache_clear()


def test_another_trl_is_noticed(tmp_path, monkeypatch):
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert scaling_runs.trainers()["version"] == [">=1.16,<1.17"]
    (tmp_path / "pyproject.toml").write_text(text.replace("trl>=1.16,<1.17", "trl>=1.17,<1.18"))
    scaling_runs.trainers.cache_clear()
    monkeypatch.setattr(scaling_runs, "ROOT", tmp_path)
    assert scaling_runs.stored() == []
    scaling_runs.trainers.cache_clear()


@pytest.mark.parametrize("installed", [True, False])
def test_what_is_missing_is_measured_and_without_trl_the_rest(
    installed, tmp_path, monkeypatch, capsys
):
    runs, settings = scaling_runs.stored(), scaling_runs.settings()
    trl, ours, stale = (next(r for r in runs if r["what"] == w) for w in ("TRL", "ours", "stale"))
    monkeypatch.setattr(scaling_runs, "PATH", tmp_path / "scaling.json")
    monkeypatch.setattr(scaling_runs, "settings", lambda: settings)
    monkeypatch.setattr(scaling_runs, "find_spec", lambda name: installed or None)
    context = types.SimpleNamespace(Pool=Pool)
    monkeypatch.setattr(scaling_runs.multiprocessing, "get_context", lambda kind: context)
    scaling_runs.save([one for one in runs if one not in (trl, ours, stale)])
    measured = []
    known = {scaling_runs.name(one): one for one in runs}
    monkeypatch.setattr(scaling_runs, "measure", lambda one: measured.append(one) or known[one])
    scaling_runs.main([])
    expected = [one for one in runs if one in (trl, ours, stale) and (installed or one != trl)]
    assert measured == [scaling_runs.name(one) for one in expected]
    assert scaling_runs.stored() == [one for one in runs if installed or one != trl]
    assert ("TRL is not installed, so 1" in capsys.readouterr().out) == (not installed)
    measured.clear()
    scaling_runs.main(["--again"])
    assert measured == [one for one in scaling_runs.RUNS if installed or one.what != "TRL"]


def test_a_stored_stale_run_is_what_the_code_gives():
    """The first ten of its sixty steps, on whatever processor this is."""
    (one,) = (
        r for r in scaling_runs.stored() if scaling_runs.name(r)[1:] == (4, "decoupled", 0, 3e-4)
    )
    found = scaling_runs.train_stale(4, "decoupled", steps=10, seed=0, every=5)
    assert found == pytest.approx(one["curve"][:2], abs=0.1)


@pytest.mark.parametrize("trainer", [*scaling_runs.TRAINERS])
def test_the_command_trains_and_begins_as_the_stored_run_did(trainer, tmp_path, monkeypatch):
    if trainer == "TRL":
        pytest.importorskip("trl", reason="the extra `scale` is not installed")
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "run.pt"
    run.main([trainer.lower(), "--out", str(out), "--steps", "2", "--seed", "1"])
    result = torch.load(out, weights_only=True)
    (one,) = (r for r in scaling_runs.stored() if r["what"] == trainer and r["seed"] == 1)
    assert result["rewards"] == pytest.approx(one["curve"][:2], abs=0.1)
    before, after = load_pretrained(scaling_runs.BASES[0])[0].state_dict(), result["parameters"]
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_an_exact_run_is_in_float64_and_an_interrupted_one_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    command = ["ours", "--exact", "--steps", "1", "--out", str(tmp_path / "run.pt")]
    run.main(command)
    parameters = torch.load(tmp_path / "run.pt", weights_only=True)["parameters"]
    assert {p.dtype for p in parameters.values()} == {torch.float64}

    def half(result, path):
        Path(path).write_bytes(b"PK")
        raise KeyboardInterrupt

    (tmp_path / "run.pt").unlink()
    monkeypatch.setattr(run, "train_ours", lambda *given, **settings: {})
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        run.main(command)
    assert [*tmp_path.iterdir()] == []


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


def test_the_writer_is_as_many_steps_behind_as_asked_and_a_run_repeats_itself(monkeypatch):
    seen, real = [], scaling_runs.written_by

    def spy(writer, *rest):
        seen.append(next(writer.parameters()).detach().clone())
        return real(writer, *rest)

    monkeypatch.setattr(scaling_runs, "written_by", spy)
    first = scaling_runs.train_stale(2, "decoupled", steps=4, every=4)
    assert [one.equal(seen[0]) for one in seen] == [True, True, True, False]
    assert first == scaling_runs.train_stale(2, "decoupled", steps=4, every=4) and len(first) == 1
