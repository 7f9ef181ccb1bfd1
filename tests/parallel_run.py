"""A script for torchrun: three steps of train_grpo, and the parameters that come out.

    torchrun --nproc_per_node 2 tests/parallel_run.py OUT CASES

CASES is a JSON object, names and settings of GRPOConfig; "loss_weight": false takes that function
away, and "short": true ends the second process's completions after one token. Each process writes
OUT.RANK.pt. Without torchrun there is one.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from unittest.mock import patch

import torch
from support import tiny_llama
from torch.nn.parallel import DistributedDataParallel

from minigrpo import parallel
from minigrpo.grpo import GRPOConfig, train_grpo


class Letters:
    """Prompts of different lengths; paid for the share of one token, so that lengths vary."""

    def prompts(self, n, generator):
        lengths = torch.randint(1, 5, (n,), generator=generator).tolist()
        return [torch.randint(1, 10, (length,), generator=generator) for length in lengths]

    def reward(self, prompts, completions):
        return [(row == 3).double().mean().item() for row in completions]


def case(loss_weight: bool = True, short: bool = False, **settings) -> dict:
    """One run."""
    policy = tiny_llama(context=24).double()  # so that rounding stays rounding
    if short and parallel.rank() == 1:
        settings["eos_id"] = list(range(policy.config.vocab_size))
    wrapped = DistributedDataParallel(policy) if parallel.world_size() > 1 else policy
    config = GRPOConfig(**{"steps": 3, "prompts_per_step": 4, "group_size": 4, **settings})
    with ExitStack() as stack:
        if not loss_weight:
            stack.enter_context(patch.object(parallel, "loss_weight", lambda mask, how: 1.0))
        run = list(train_grpo(wrapped, Letters(), config))
    return {
        "parameters": {name: p.detach() for name, p in policy.named_parameters()},
        "rewards": [m.rewards for m in run],
        "tokens": [int(m.rollouts.completion_mask.sum()) for m in run],
        "norms": [m.grad_norm for m in run],
        "scored": [int((m.advantages != 0).sum()) for m in run],
    }


def main() -> None:
    """Run all cases and save."""
    out, cases = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        parallel.join()
    saved = {name: case(**settings) for name, settings in cases.items()}
    torch.save(saved, f"{out}.{parallel.rank()}.pt")
    parallel.leave()


if __name__ == "__main__":
    main()
