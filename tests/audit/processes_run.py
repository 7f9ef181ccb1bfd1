"""A script for torchrun: three steps of `train_shared`, and the parameters that come out.

    torchrun --nproc_per_node 2 tests/audit/processes_run.py OUT CASES

CASES is a JSON object, names and settings of GRPOConfig. "exact": false gives each process its own
random numbers, "summit": true takes the run of notebook 07, "short": true ends the second process's
completions after one token. Each process writes OUT.RANK.pt. Without torchrun there is one.
"""

import json
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from support import tiny_gpt

from minigrpo.arithmetic import Arithmetic
from minigrpo.grpo import GRPOConfig
from minigrpo.llama import load_policy
from minigrpo.scaling.processes import train_shared, world
from minigrpo.study.experiments import SUMMIT


class Letters:
    """Prompts of different lengths; paid for the share of one token, so that lengths vary."""

    def prompts(self, n, generator):
        lengths = torch.randint(1, 5, (n,), generator=generator).tolist()
        return [torch.randint(1, 10, (length,), generator=generator) for length in lengths]

    def reward(self, prompts, completions):
        return [(row == 3).double().mean().item() for row in completions]


def case(exact: bool = True, summit: bool = False, short: bool = False, **settings) -> dict:
    """One run, in float64, so that rounding stays rounding."""
    if summit:
        policy, task = load_policy().double(), Arithmetic()
        config = replace(SUMMIT, steps=3, **settings)
    else:  # the others begin with weights of their own, until the first process's are sent around
        policy, task = tiny_gpt(seed=world()[0]), Letters()
        if short and world()[0] == 1:
            settings["eos_id"] = list(range(11))
        config = GRPOConfig(**{"steps": 3, "prompts_per_step": 4, "group_size": 4, **settings})
    run = list(train_shared(policy, task, config, exact=exact))
    return {
        "parameters": {name: p.detach() for name, p in policy.named_parameters()},
        "rewards": [m.rewards for m in run],
        "advantages": [m.advantages for m in run],
        "metrics": [[m.loss, m.kl or 0.0, m.clip_low, m.clip_high] for m in run],
        "entropy": [m.entropy for m in run],
        "tokens": [int(m.rollouts.own.sum()) for m in run],
        "norms": [m.grad_norm for m in run],
        "scored": [int((m.advantages != 0).sum()) for m in run],
    }


def main() -> None:
    """Run all cases and save."""
    out, cases = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    saved = {name: case(**settings) for name, settings in cases.items()}
    torch.save(saved, f"{out}.{world()[0]}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
