"""Several processes that train one policy: who takes which share, and what has to be added up.

Call `join()` under torchrun, and wrap the policy in DistributedDataParallel for `train_grpo`.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def join(backend: str = "gloo") -> tuple[int, int]:
    """Join the group of torchrun ("cpu:gloo,cuda:nccl" on GPUs); returns rank and world size."""
    if "RANK" not in os.environ:
        raise RuntimeError("join: expected to be started by torchrun, but RANK is not set")
    if not dist.is_initialized():
        dist.init_process_group(backend)
    return rank(), world_size()


def leave() -> None:
    """Leave the group together: a process that went first would break it for the others."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank() -> int:  # number of this process, 0 if it is alone
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:  # number of processes
    return dist.get_world_size() if dist.is_initialized() else 1


def share(items: Sequence) -> Sequence:
    """This process's part of a list: the first to rank 0, and so on; ValueError if they differ."""
    each, left = divmod(len(items), world_size())
    if left:  # then the mean of the gradients would not be that of the whole
        what = f"a multiple of {world_size()}, the number of processes"
        raise ValueError(f"prompts_per_step: expected {what}, got {len(items)}")
    return items[rank() * each : (rank() + 1) * each]


def loss_weight(mask: Tensor, how: str) -> float:
    """What to multiply the loss with, so that the mean over processes is that of the whole batch.

    Rows need nothing: each process has as many. Of the tokens, mask (N, T), it has its own share.
    """
    if world_size() == 1 or how != "token_mean":
        return 1.0
    total = mask.sum().double().cpu()
    dist.all_reduce(total)
    return world_size() * mask.sum().item() / total.item()


def last_pass_syncs(policy: nn.Module, last: bool):
    """Around a pass over a part of the batch: processes add up their gradients once, at the end.

    They don't all call the policy as often, so a call must not wait for the others' buffers.
    """
    several = isinstance(policy, DistributedDataParallel)
    if several:
        policy.broadcast_buffers = False
    return policy.no_sync() if several and not last else nullcontext()


def unwrapped(policy: nn.Module) -> nn.Module:
    """The policy itself, without DistributedDataParallel around it."""
    return policy.module if isinstance(policy, DistributedDataParallel) else policy


def check_run(policy: nn.Module, config, checkpoint) -> None:
    """Raise ValueError for what would go wrong without a word with several processes."""
    if world_size() == 1:
        return
    if unwrapped(policy) is policy:
        raise ValueError("policy: expected DistributedDataParallel; each would train its own")
    if config.entropy_weight and config.how != "token_mean":  # the bonus is a mean over tokens
        raise ValueError("entropy_weight: expected how='token_mean' with several processes")
    if config.scale == "batch":  # each would divide by the std of its own share
        raise ValueError("scale: expected 'group' or 'none' with several processes, got 'batch'")
    if checkpoint and not config.split_invariant:  # one file, and random numbers for each
        raise ValueError("checkpoint: expected split_invariant=True with several processes")
