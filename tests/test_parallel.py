"""Several processes: the same run as one, where it has to be the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from minigrpo import parallel
from minigrpo.grpo import GRPOConfig
from minigrpo.sampling import sample

SCRIPT = Path(__file__).with_name("parallel_run.py")
USUAL = {
    "max_new_tokens": 8,
    "eos_id": 0,
    "inner_epochs": 2,
    "kl_weight": 0.1,
    "lr": 0.01,
    "split_invariant": True,
    "check": False,
}


MEANS = ("token_mean", "sequence_mean", "constant")
CASES = {
    **{how: {**USUAL, "how": how} for how in MEANS},
    "no weight": {**USUAL, "how": "token_mean", "loss_weight": False},
    "own noise": {**USUAL, "split_invariant": False, "steps": 1},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, list[dict]]:
    """By number of processes: for each process what it has saved of all cases."""
    found = {}
    paths = [str(SCRIPT.parent), str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    for processes in (1, 2):
        out = tmp_path_factory.mktemp("runs") / "run"
        start = [sys.executable]
        if processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc_per_node", str(processes)]
        done = subprocess.run(
            [*start, str(SCRIPT), str(out), json.dumps(CASES)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found[processes] = [
            torch.load(f"{out}.{rank}.pt", weights_only=True) for rank in range(processes)
        ]
    return found


def difference(one: dict, other: dict) -> float:
    pairs = [(one["parameters"][name], other["parameters"][name]) for name in one["parameters"]]
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("how", MEANS)
def test_one_and_two_processes_give_the_same_parameters(runs, how):
    alone, first, second = runs[1][0][how], runs[2][0][how], runs[2][1][how]
    assert difference(first, second) == 0
    assert difference(alone, first) < 1e-6
    # Each has half of the rows, and they are those of the one.
    for rewards, *halves in zip(alone["rewards"], first["rewards"], second["rewards"]):
        assert torch.equal(torch.cat(halves), rewards)
    # If nothing moved, or both had as many tokens, this would prove nothing.
    assert min(alone["norms"]) > 0.01 and first["tokens"] != second["tokens"]


def test_without_the_weight_a_token_mean_is_another_one(runs):
    """The bug that `loss_weight` is for: the mean of two token means is not the mean of all."""
    alone, broken = runs[1][0]["token_mean"], runs[2][0]["no weight"]
    assert difference(alone, broken) > 1e-4
    assert difference(alone, runs[1][0]["no weight"]) == 0  # alone it does nothing


def test_processes_with_random_numbers_of_their_own_write_different_texts(runs):
    first, second = (one["own noise"] for one in runs[2])
    assert difference(first, second) == 0
    assert not torch.equal(first["rewards"][0], second["rewards"][0])


# --------------------------------------------------------------------------------------------
# one process


def test_alone_nothing_is_different():
    assert (parallel.rank(), parallel.world_size()) == (0, 1)
    assert parallel.share([1, 2, 3]) == [1, 2, 3]
    assert parallel.total(2.5) == 2.5
    assert parallel.loss_weight(torch.ones(2, 3), "token_mean") == 1.0
    model = nn.Linear(1, 1)
    assert parallel.unwrapped(model) is model
    parallel.leave()


def test_join_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="join: expected to be started by torchrun"):
        parallel.join()


class Pretend:
    """A group of processes, as far as shares and sums need one."""

    def __init__(self, monkeypatch, rank, size, other_tokens=0.0):
        monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(parallel.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(parallel.dist, "get_world_size", lambda: size)
        monkeypatch.setattr(parallel.dist, "all_reduce", lambda number: number.add_(other_tokens))


def test_shares_are_whole_and_even(monkeypatch):
    for rank, mine in enumerate(([1, 2], [3, 4], [5, 6])):
        Pretend(monkeypatch, rank, 3)
        assert parallel.share([1, 2, 3, 4, 5, 6]) == mine
    with pytest.raises(
        ValueError, match="expected a multiple of 3, the number of processes, got 4"
    ):
        parallel.share([1, 2, 3, 4])


def test_the_weight_is_the_share_of_the_tokens(monkeypatch):
    Pretend(monkeypatch, 0, 2, other_tokens=6.0)
    mask = torch.tensor([[1, 1, 0]])
    assert parallel.loss_weight(mask, "token_mean") == 2 * 2 / 8
    assert parallel.loss_weight(mask, "sequence_mean") == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_equal_groups": True}, "skip_equal_groups: expected False with several processes"),
        (
            {"entropy_weight": 0.1, "how": "sequence_mean"},
            "entropy_weight: expected 0 with several",
        ),
    ],
)
def test_settings_that_several_processes_cannot_have(monkeypatch, settings, message):
    from minigrpo.grpo import _check_parallel

    Pretend(monkeypatch, 0, 2)
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="policy: expected one in DistributedDataParallel"):
        _check_parallel(model, GRPOConfig())
    monkeypatch.setattr(parallel, "unwrapped", lambda policy: None)
    with pytest.raises(ValueError, match=message):
        _check_parallel(model, GRPOConfig(**settings))
    _check_parallel(model, GRPOConfig())


# --------------------------------------------------------------------------------------------
# random numbers drawn beforehand


def test_a_row_depends_on_its_own_random_numbers_alone():
    from support import tiny_llama

    model = tiny_llama()
    prompts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    uniforms = torch.rand(6, 8, generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 8, "completions_per_prompt": 2, "eos_id": 0}
    whole = sample(model, prompts, uniforms=uniforms, **settings)
    for part in range(3):
        rows = slice(2 * part, 2 * part + 2)
        alone = sample(model, prompts[part : part + 1], uniforms=uniforms[rows], **settings)
        width = alone.completions.shape[1]
        assert torch.equal(alone.completions, whole.completions[rows, :width])
        assert torch.equal(alone.completion_mask, whole.completion_mask[rows, :width])


def test_they_draw_from_the_distribution():
    from support import Bigram

    table = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.9, 0.0], [1 / 3, 1 / 3, 1 / 3]]).log()
    model, n = Bigram(table), 6000
    uniforms = torch.rand(n, 1, generator=torch.Generator().manual_seed(1))
    drawn = sample(model, torch.zeros(n, 1).long(), max_new_tokens=1, uniforms=uniforms)
    shares = torch.bincount(drawn.completions[:, 0], minlength=3) / n
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.2, 0.3]), atol=0.025, rtol=0)
    edges = torch.tensor([[0.0], [0.4999], [0.5001], [1.0]])
    drawn = sample(model, torch.zeros(4, 1).long(), max_new_tokens=1, uniforms=edges)
    assert drawn.completions[:, 0].tolist() == [0, 0, 1, 2]
    never = Bigram(torch.tensor([[0.5, 0.5, 0.0]] * 3).log())  # its last token is impossible
    drawn = sample(never, torch.zeros(4, 1).long(), max_new_tokens=1, uniforms=edges)
    assert drawn.completions[:, 0].tolist() == [0, 0, 1, 1]
    for wrong in (7.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="uniforms: expected numbers from 0 to 1"):
            sample(model, torch.zeros(1, 1).long(), max_new_tokens=1, uniforms=edges[:1] + wrong)
    with pytest.raises(ValueError, match=r"uniforms: expected shape \(4, 1\), got \(3, 1\)"):
        sample(model, torch.zeros(4, 1).long(), max_new_tokens=1, uniforms=edges[:3])
