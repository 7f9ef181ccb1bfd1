"""PPO (Schulman et al. 2017, arXiv 1707.06347) beside GRPO, for the same policies and tasks.

GRPO compares a text with others that answer its prompt. PPO asks a second network, the critic, how
much reward is still to come before each token, whose advantage is how much better it then went.
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from minigrpo import grpo
from minigrpo.checks import check_shape
from minigrpo.logprobs import completion_logits, masked_mean
from minigrpo.objective import group_advantages, grpo_loss


def critic_of(policy: nn.Module) -> nn.Module:
    """A copy of the policy whose `lm_head` has one output, the value, at first 0 everywhere."""
    critic = copy.deepcopy(policy)
    critic.lm_head.weight = nn.Parameter(torch.zeros_like(critic.lm_head.weight[:1]))  # (1, width)
    return critic


def state_values(critic: nn.Module, r: grpo.Rollouts) -> Tensor:
    """(N, T), with gradient, 0 where masked: column t has read all that comes before token t."""
    values = torch.cat(completion_logits(critic, *r.text), dim=1).squeeze(-1)
    return torch.where(r.completion_mask, values, 0.0)


def at_the_end(rewards: Tensor, rollouts: grpo.Rollouts) -> Tensor:
    """(N,) -> (N, T): the reward of a text comes with its last token."""
    last = rollouts.completion_mask.sum(dim=1, keepdim=True) - 1  # (N, 1)
    return rewards.new_zeros(rollouts.completions.shape).scatter(1, last, rewards[:, None])


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, section 3).

    rewards (one per token), values (of the state before it), mask (padded on the right): (N, T).
    A_t = delta_t + lam A_{t+1}, where delta_t = r_t + V_{t+1} - V_t, and A and V are 0 after the
    last real token; gamma is 1. Returns A and what the critic should have said, A + V, both (N, T).
    """
    check_shape("values", values, rewards.shape)
    check_shape("mask", mask, rewards.shape)
    real = mask.bool()
    if (real[:, 1:] & ~real[:, :-1]).any():
        raise ValueError("mask: expected padding on the right, got some before a real token")
    rewards, values = torch.where(real, rewards, 0.0), torch.where(real, values, 0.0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])  # (N,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + next_value - values[:, t]
        advantages[:, t] = delta + lam * next_advantage
        next_value, next_advantage = values[:, t], advantages[:, t]
    return advantages, advantages + values


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """(N, T): mean 0 and std 1 over the batch's real tokens, as if they were one group."""
    whitened = group_advantages(advantages[mask.bool()], int(mask.sum()))
    return torch.zeros_like(advantages).masked_scatter(mask.bool(), whitened)


def value_loss(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Half the mean squared error over the real tokens; all (N, T) -> ()."""
    check_shape("returns", returns, values.shape)
    return (values - returns.detach())[mask.bool()].square().mean() / 2


def ppo_loss(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **others: Any
) -> tuple[Tensor, dict[str, float]]:
    """`grpo_loss` with an advantage per token, each token a text of its own. All tensors (N, T)."""
    real = mask.bool()
    others = {k: x[real, None] if isinstance(x, Tensor) else x for k, x in others.items()}
    return grpo_loss(new[real, None], old[real, None], advantages[real], real[real, None], **others)


def train_ppo(
    policy: nn.Module,  # trained in place, as the critic is; both are left in eval mode
    critic: nn.Module,  # see `critic_of`
    task: grpo.Task,
    config: grpo.GRPOConfig,  # not used: scale, baseline, how, level, check
    lam: float = 0.95,  # see `gae`: 0 believes what the critic says next, 1 waits for the end
    critic_lr: float = 1e-3,
    per_token: Callable[[Tensor, grpo.Rollouts], Tensor] = at_the_end,  # rewards (N,) -> (N, T)
) -> Iterator[grpo.StepMetrics]:
    """`train_grpo` with a critic; evaluation["value_loss"] is how far off it was on new texts."""
    policy.eval()
    critic.eval()
    reference = grpo.frozen_copy(policy) if config.kl_weight else None
    groups = [{"params": policy.parameters()}, {"params": critic.parameters(), "lr": critic_lr}]
    optimizer = torch.optim.Adam(groups, config.lr, config.betas)
    order = torch.Generator().manual_seed(config.seed)
    sampling = torch.Generator(next(policy.parameters()).device).manual_seed(config.seed)
    terms = config.loss_settings | {"how": "token_mean"}
    for step in range(1, config.steps + 1):
        began, updates = time.perf_counter(), []
        prompts = list(task.prompts(config.prompts_per_step, order))
        rollouts, rewards = grpo.rollout(policy, task, prompts, config, sampling)  # P * G rows
        values, mask = state_values(critic, rollouts).detach(), rollouts.own  # (N, T)
        advantages, returns = gae(per_token(rewards.to(values), rollouts), values, mask, lam=lam)
        advantages, off = whiten(advantages, mask), value_loss(values, returns, mask).item()
        terms["ref_log_probs"] = reference and grpo.score(reference, rollouts, config)[0]
        for _ in range(config.inner_epochs):
            new, entropy = grpo.score(policy, rollouts, config)  # (N, T)
            terms["entropy"] = entropy if config.entropy_weight else entropy.detach()
            loss, metrics = ppo_loss(new, rollouts.log_probs, advantages, mask, **terms)
            optimizer.zero_grad()
            loss.backward()
            value_loss(state_values(critic, rollouts), returns, mask).backward()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm).item()
            nn.utils.clip_grad_norm_(critic.parameters(), config.max_grad_norm)
            optimizer.step()
            updates.append({**metrics, "loss": loss.item(), "grad_norm": norm})
        means = masked_mean(advantages, mask, dim=1)
        metrics = grpo.measure(step, began, rollouts, rewards, means, updates, config)
        yield replace(metrics, evaluation={"value_loss": off})
