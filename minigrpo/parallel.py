"""Several processes that train one policy: who takes which share, and what has to be added up.

Start them with `torchrun --nproc_per_node 2 script.py`, call `join()` first, wrap the policy in
PyTorch's DistributedDataParallel and hand it to `train_grpo`. Each process then samples and scores
its share of the prompts; DistributedDataParallel averages the gradients. Without `join()`, and in
every notebook before 09, there is one process, and nothing here does anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Item = TypeVar("Item")


def join(backend: str = "gloo") -> tuple[int, int]:
    """Join the group that torchrun started.

    Args:
        backend: "gloo" on CPUs, "cpu:gloo,cuda:nccl" on GPUs (counts are added up on the CPU).

    Returns:
        the rank of this process, and how many there are.

    Raises:
        RuntimeError: torchrun did not start this process.
    """
    if "RANK" not in os.environ:
        raise RuntimeError(
            "join: expected to be started by torchrun (torchrun --nproc_per_node 2 script.py), "
            "but the variable RANK is not set"
        )
    if not dist.is_initialized():
        dist.init_process_group(backend)
    return rank(), world_size()


def leave() -> None:
    """Leave the group together, when all is done: who went first would break it for the others."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank() -> int:
    """Number of this process, 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(items: Sequence[Item]) -> Sequence[Item]:
    """The part of a list that belongs to this process: the first to rank 0, and so on.

    Raises:
        ValueError: it cannot be divided evenly, and then the averages of the gradients would not be
            those of the whole.
    """
    size = world_size()
    if len(items) % size:
        raise ValueError(
            f"prompts_per_step: expected a multiple of {size}, the number of processes, got "
            f"{len(items)}"
        )
    each = len(items) // size
    return items[rank() * each : (rank() + 1) * each]


def total(value: float) -> float:
    """The sum of a number over all processes."""
    if world_size() == 1:
        return value
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number)
    return number.item()


def loss_weight(mask: Tensor, how: str) -> float:
    """What the loss of this process has to be multiplied with, so that averages of gradients over
    processes are the gradient of the whole batch.

    A mean over rows needs nothing: each process has as many. A mean over *tokens* does: the tokens
    of the process count as much as its share of all, and not one share in `world_size()`.

    Args:
        mask: (N, T), this process's completions.
        how: of `aggregate`.
    """
    if world_size() == 1 or how != "token_mean":
        return 1.0
    mine = mask.sum().item()
    return world_size() * mine / total(mine)


def unwrapped(policy: nn.Module) -> nn.Module:
    """The policy itself, without DistributedDataParallel around it."""
    return policy.module if isinstance(policy, DistributedDataParallel) else policy
