"""Several processes: the same run as one, where it has to be the same."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from minigrpo.arithmetic import Arithmetic
from minigrpo.grpo import train_grpo
from minigrpo.llama import load_policy
from minigrpo.objective import group_advantages
from minigrpo.scaling import processes
from minigrpo.study.experiments import SUMMIT

SCRIPT = Path(__file__).with_name("processes_run.py")
ROOT = SCRIPT.parents[2]
USUAL = {"max_new_tokens": 8, "eos_id": 0, "inner_epochs": 2, "lr": 0.01, "check": False}
PARTS = {"rows_per_pass": 3, "prompts_per_step": 8, "group_size": 2}
TERMS = {"kl_weight": 0.1, "entropy_weight": 0.05}
NOTEBOOK = {"run": {}, "run, parts": {"rows_per_pass": 24}}
SAME = {  # on any number of processes
    "KL and entropy": {**USUAL, **TERMS, "how": "token_mean"},
    "parts": {**USUAL, **PARTS, "how": "token_mean"},
    **{
        f"{how}, parts, all terms": {**USUAL, **PARTS, **TERMS, "how": how}
        for how in ("token_mean", "sequence_mean", "constant")
    },
    "scale of the batch": {**USUAL, "scale": "batch"},
    "one ratio per sequence": {**USUAL, **TERMS, "level": "sequence"},
    **{name: {"summit": True, **settings} for name, settings in NOTEBOOK.items()},
}
OTHERS = {
    "own noise": {**USUAL, "exact": False, "steps": 1, "scale": "batch"},
    "short": {**USUAL, **PARTS, "short": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, list[dict]]:
    """By number of processes: for each process what it has saved of all cases."""
    saved = {}
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    for number in (1, 2):
        out = tmp_path_factory.mktemp("runs") / "run"
        start = [sys.executable]
        if number > 1:
            start += ["-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc_per_node", str(number)]
        done = subprocess.run(
            [*start, str(SCRIPT), str(out), json.dumps(SAME | OTHERS)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        saved[number] = [
            torch.load(f"{out}.{rank}.pt", weights_only=True) for rank in range(number)
        ]
    return saved


def difference(one: dict, other: dict) -> float:
    pairs = [(one["parameters"][name], other["parameters"][name]) for name in one["parameters"]]
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("name", SAME)
def test_one_and_two_processes_give_the_same_parameters(runs, name):
    """With a KL and an entropy bonus, too, in parts, and whatever rows each has to score."""
    alone, first, second = runs[1][0][name], runs[2][0][name], runs[2][1][name]
    assert difference(first, second) == 0
    assert difference(alone, first) < 1e-10
    # Each has half of the rows, and they are those of the one; what a batch is measured by is one.
    for what in ("rewards", "advantages"):
        for whole, *halves in zip(alone[what], first[what], second[what]):
            assert torch.equal(torch.cat(halves), whole)
    for whole, *both in zip(alone["metrics"], first["metrics"], second["metrics"]):
        assert both[0] == both[1] == pytest.approx(whole, abs=1e-10)
    if "parts" not in name or "terms" in name:  # else a process of equal groups alone scores a row
        assert first["entropy"] == second["entropy"] == pytest.approx(alone["entropy"], abs=1e-10)
    assert first["norms"] == second["norms"] == pytest.approx(alone["norms"])
    # If nothing moved, or both had as many tokens, this would prove nothing.
    assert "run" in name or max(low + high for *_, low, high in alone["metrics"]) > 0
    assert min(alone["norms"]) > 0.01 and first["tokens"] != second["tokens"]


def test_processes_may_have_more_or_fewer_parts(runs):
    first, second = (one["parts"] for one in runs[2])
    parts = [[-(-rows // 3) for rows in one["scored"]] for one in (first, second)]
    assert parts[0] != parts[1]


def test_processes_that_call_the_policy_more_or_less_often_do_not_wait_for_each_other(runs):
    """One token is scored from the prompt alone; the others need a second call."""
    first, second = (one["short"] for one in runs[2])
    assert difference(first, second) == 0
    assert second["tokens"] == [8] * 3 and min(first["tokens"]) > 8


def test_processes_with_random_numbers_of_their_own_write_different_texts(runs):
    """And compare their rewards with those of all, where the scale is that of the batch."""
    first, second = (one["own noise"] for one in runs[2])
    assert difference(first, second) == 0
    assert not torch.equal(first["rewards"][0], second["rewards"][0])
    rewards, advantages = (
        torch.cat([first[what][0], second[what][0]]) for what in ("rewards", "advantages")
    )
    assert torch.equal(advantages, group_advantages(rewards, 4, scale="batch"))


def test_alone_it_is_the_loop_of_the_core(runs):
    """And in parts it's the run in one piece."""
    policy = load_policy().double()
    list(train_grpo(policy, Arithmetic(), replace(SUMMIT, steps=3)))
    plain = {"parameters": dict(policy.named_parameters())}
    assert difference(runs[1][0]["run"], plain) == 0
    assert difference(runs[1][0]["run, parts"], plain) < 1e-10


def test_shares_are_whole_and_even(monkeypatch):
    for rank, mine in enumerate(([1, 2], [3, 4], [5, 6])):
        monkeypatch.setattr(processes, "world", lambda rank=rank: (rank, 3))
        assert processes.share([1, 2, 3, 4, 5, 6]) == mine
    with pytest.raises(
        ValueError, match="expected a multiple of 3, the number of processes, got 4"
    ):
        processes.share([1, 2, 3, 4])


def test_a_batch_that_cannot_be_shared_is_refused_before_anything_is_sampled(monkeypatch):
    monkeypatch.setattr(processes, "world", lambda: (0, 3))
    for exact in (True, False):
        run = processes.train_shared(nn.Linear(1, 1), Arithmetic(), SUMMIT, exact=exact)
        with pytest.raises(ValueError, match="expected a multiple of 3, .*, got 16"):
            next(run)


def test_weights_of_half_precision_are_refused_here_too():
    with pytest.raises(ValueError, match="expected weights in float32"):
        next(processes.train_shared(nn.Linear(1, 1).bfloat16(), Arithmetic(), SUMMIT))


def test_a_policy_that_never_ends_is_named_here_too():
    config = replace(SUMMIT, eos_id=12, max_new_tokens=2)
    with pytest.raises(RuntimeError, match="of the first step ended with eos_id = 12"):
        next(processes.train_shared(load_policy(), Arithmetic(), config))


def test_each_process_draws_with_its_own_seed_unless_the_run_is_exact(monkeypatch):
    seeds = []

    def rollout(policy, task, prompts, config, generator):
        seeds.append(generator.initial_seed())
        raise InterruptedError

    monkeypatch.setattr(processes.grpo, "rollout", rollout)
    for exact in (True, False):
        for rank in range(2):
            monkeypatch.setattr(processes, "world", lambda rank=rank: (rank, 2))
            run = processes.train_shared(nn.Linear(1, 1), Arithmetic(), SUMMIT, exact=exact)
            with pytest.raises(InterruptedError):
                next(run)
    assert seeds[0] == seeds[1] == seeds[2] != seeds[3]
