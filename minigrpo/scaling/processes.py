"""Several processes that train one policy: each takes its share of the prompts.

Averages divide by the rows and tokens of the whole batch, so what each of them finds just adds up.
Under torchrun, `torch.distributed.init_process_group` comes first.
"""

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigrpo import checks, grpo


def world() -> tuple[int, int]:  # the number of this process, and how many there are
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share(rows: Sequence) -> Sequence:
    """This process's share: the first to rank 0, and so on; ValueError if they would differ."""
    rank, processes = world()
    each, left = divmod(len(rows), processes)
    if left:
        what = f"a multiple of {processes}, the number of processes"
        raise ValueError(f"prompts_per_step: expected {what}, got {len(rows)}")
    return rows[rank * each : (rank + 1) * each]


def all_reduce(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Add each up over all processes, in place."""
    for tensor in tensors if dist.is_initialized() else ():
        dist.all_reduce(tensor)
    return tensors


def gathered(rewards: Tensor) -> Tensor:
    """(n,) of each process -> (N,) of all, in their order."""
    rank, processes = world()
    everyone = rewards.new_zeros(processes, len(rewards))
    everyone[rank] = rewards
    return all_reduce(everyone)[0].flatten()


def train_shared(
    policy: nn.Module,  # trained in place, from the first process's weights; left in eval mode
    task: grpo.Task,
    config: grpo.GRPOConfig,  # of all processes together
    *,
    exact: bool = False,  # the same run on any number of processes, of which each samples all rows
) -> Iterator[grpo.StepMetrics]:
    """`train_grpo` on all processes; rollouts, rewards and extremes are of this one's rows."""
    checks.check_weights(policy)
    for weight in policy.state_dict().values() if dist.is_initialized() else ():
        dist.broadcast(weight, 0)
    policy.eval()
    reference = grpo.frozen_copy(policy) if config.kl_weight else None
    optimizer = torch.optim.AdamW(policy.parameters(), config.lr, config.betas, weight_decay=0.0)
    order = torch.Generator().manual_seed(config.seed)
    sampling = torch.Generator(next(policy.parameters()).device)
    sampling.manual_seed(config.seed + (0 if exact else 7919 * world()[0]))
    for step in range(1, config.steps + 1):
        began = time.perf_counter()
        prompts = task.prompts(config.prompts_per_step, order)
        mine = share(prompts)
        rollouts, rewards = grpo.rollout(policy, task, prompts if exact else mine, config, sampling)
        checks.check_ends(step, grpo.ended(rollouts, config.eos_id), config)
        if exact:
            rows = share(torch.arange(len(rewards)))
            rollouts, rewards = rollouts[rows], rewards[rows]
        advantages = share(grpo.group_advantages(gathered(rewards), **config.advantage_settings))
        updates = grpo.learn(policy, reference, optimizer, rollouts, advantages, config, all_reduce)
        yield grpo.measure(step, began, rollouts, rewards, advantages, updates, config)
