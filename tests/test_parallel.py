"""Several processes: the same run as one, where it has to be the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import tiny_llama
from torch import nn

from minigrpo import grpo, parallel
from minigrpo.grpo import GRPOConfig

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


PARTS = {"kl_weight": 0.0, "rows_per_pass": 3, "prompts_per_step": 8, "group_size": 2}
MEANS = ("token_mean", "sequence_mean", "constant")
CASES = {
    **{how: {**USUAL, "how": how} for how in MEANS},
    "no weight": {**USUAL, "how": "token_mean", "loss_weight": False},
    "own noise": {**USUAL, "split_invariant": False, "steps": 1},
    **{f"parts, {how}": {**USUAL, **PARTS, "how": how} for how in MEANS},
    "short": {**USUAL, **PARTS, "short": True},
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


@pytest.mark.parametrize("how", [*MEANS, *(f"parts, {how}" for how in MEANS)])
def test_one_and_two_processes_give_the_same_parameters(runs, how):
    """Also if they score in parts, and the one has more rows that teach, and more parts."""
    alone, first, second = runs[1][0][how], runs[2][0][how], runs[2][1][how]
    assert difference(first, second) == 0
    assert difference(alone, first) < 1e-6
    # Each has half of the rows, and they are those of the one.
    for rewards, *halves in zip(alone["rewards"], first["rewards"], second["rewards"]):
        assert torch.equal(torch.cat(halves), rewards)
    # If nothing moved, or both had as many tokens, this would prove nothing.
    assert min(alone["norms"]) > 0.01 and first["tokens"] != second["tokens"]
    parts = [[-(-rows // 3) for rows in one["scored"]] for one in (first, second)]
    assert not how.startswith("parts") or parts[0] != parts[1]


def test_processes_that_call_the_policy_more_or_less_often_do_not_wait_for_each_other(runs):
    """One token is scored from the prompt alone; the others need a second call."""
    first, second = (one["short"] for one in runs[2])
    assert difference(first, second) == 0
    assert second["tokens"] == [8] * 3 and min(first["tokens"]) > 8


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


def test_what_would_go_wrong_without_a_word(monkeypatch):
    Pretend(monkeypatch, 0, 2)
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="policy: expected DistributedDataParallel"):
        parallel.check_run(model, GRPOConfig(), None)
    monkeypatch.setattr(parallel, "unwrapped", lambda policy: None)
    parallel.check_run(model, GRPOConfig(split_invariant=True), "run.pt")
    with pytest.raises(ValueError, match="entropy_weight: expected how='token_mean' with several"):
        parallel.check_run(model, GRPOConfig(entropy_weight=0.1), None)
    with pytest.raises(ValueError, match="scale: expected 'group' or 'none' with several"):
        parallel.check_run(model, GRPOConfig(scale="batch"), None)
    with pytest.raises(ValueError, match="checkpoint: expected split_invariant=True with several"):
        parallel.check_run(model, GRPOConfig(), "run.pt")


def test_split_invariant_rows_are_the_share_of_one_batch(monkeypatch):
    """Both processes sample all rows from the same numbers, and each keeps and pays its own."""
    asked = []

    class Task:
        def prompts(self, n, generator):
            return [torch.tensor([token]) for token in range(1, n + 1)]

        def reward(self, prompts, completions):
            asked.append([int(prompt) for prompt in prompts])
            return [float(completion.sum()) for completion in completions]

    config = GRPOConfig(prompts_per_step=2, group_size=2, max_new_tokens=5, split_invariant=True)
    task, model = Task(), tiny_llama()
    prompts = task.prompts(2, None)

    def roll():
        return grpo.rollout(model, task, prompts, config, torch.Generator().manual_seed(0))

    whole, rewards = roll()
    for rank in range(2):
        Pretend(monkeypatch, rank, 2)
        part, paid = roll()
        assert torch.equal(part.completions, whole.completions[2 * rank : 2 * rank + 2])
        assert torch.equal(paid, rewards[2 * rank : 2 * rank + 2])
    assert asked == [[1, 1, 2, 2], [1, 1], [2, 2]]


@pytest.mark.parametrize("split_invariant", [True, False])
def test_processes_have_their_own_random_numbers_unless_the_split_must_not_matter(
    monkeypatch, split_invariant
):
    class Stop(Exception):
        pass

    seeds = []

    def rollout(policy, task, prompts, config, generator):
        seeds.append(generator.initial_seed())
        raise Stop

    monkeypatch.setattr(grpo, "rollout", rollout)
    monkeypatch.setattr(parallel, "check_run", lambda *_: None)
    task = SimpleNamespace(prompts=lambda n, generator: [])
    for rank in range(2):
        Pretend(monkeypatch, rank, 2)
        with pytest.raises(Stop):
            next(grpo.train_grpo(tiny_llama(), task, GRPOConfig(split_invariant=split_invariant)))
    assert (seeds[0] == seeds[1]) is split_invariant
