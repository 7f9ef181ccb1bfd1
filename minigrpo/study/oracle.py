"""Exact answers by enumeration, in a world small enough to list.

Five tokens, one of them EOS, and completions of up to four tokens make 341 possible texts. Every
expectation over samples is then a finite sum: the expected reward and its gradient, the KL
divergence both ways, and the bias and variance of anything that estimates them from a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from minigrpo.checks import is_whole_number
from minigrpo.logprobs import sequence_log_probs, token_log_probs

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""log_probs (B, G, T), mask (B, G, T), rewards (B, G) -> losses (B,), one per group."""

MOST_GROUPS = 1_000_000
CHUNK = 4096  # groups whose gradients are held at a time


class TablePolicy(nn.Module):
    """A policy whose next token depends on the last one only: row a of the table, after token a.

    table: (V, V) logits. Answers the Hugging Face call, so that `sample`, `token_log_probs` and
    `train_grpo` take it; it has nothing to cache.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.detach().clone())

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids], past_key_values=None)


@dataclass(frozen=True)
class World:
    """Every completion there is. The prompt is a single EOS, as at the start of a document.

    Attributes:
        completions: (M, T) token ids, EOS after the end.
        mask: (M, T) bool, True up to and including the first EOS.
        vocab_size: V; the last token is EOS.
    """

    completions: Tensor
    mask: Tensor
    vocab_size: int

    @property
    def eos_id(self) -> int:
        return self.vocab_size - 1

    def log_probs(self, policy: nn.Module) -> Tensor:
        """(M, T) log-probability of each token of each completion, with gradient."""
        prompt = torch.full((len(self.completions), 1), self.eos_id)
        real = torch.cat([torch.ones_like(prompt), self.mask], dim=1)
        return token_log_probs(policy, torch.cat([prompt, self.completions], dim=1), real)


def list_world(vocab_size: int = 5, max_length: int = 4) -> World:
    """List every completion of up to `max_length` tokens over `vocab_size` tokens, EOS the last.

    A completion ends with EOS, or was cut off at `max_length`.

    Raises:
        ValueError: fewer than two tokens, no length, or vocab_size^max_length above 100,000.
    """
    if vocab_size < 2 or max_length < 1 or vocab_size**max_length > 100_000:
        raise ValueError(
            "vocab_size, max_length: expected 2 or more and 1 or more, and at most 100,000 texts, "
            f"got {vocab_size} and {max_length}"
        )
    eos = vocab_size - 1
    texts = [
        words + (eos,) * (max_length - length)
        for length in range(max_length + 1)
        for words in itertools.product(range(eos), repeat=length)
    ]
    completions = torch.tensor(texts)
    length = (completions != eos).sum(dim=1)  # without EOS
    mask = torch.arange(max_length) <= length[:, None]
    return World(completions, mask, vocab_size)


def probabilities(policy: nn.Module, world: World) -> Tensor:
    """(M,) probability of each completion, with gradient; they sum to 1."""
    return sequence_log_probs(world.log_probs(policy), world.mask).exp()


def expected_reward(policy: nn.Module, world: World, rewards: Tensor) -> Tensor:
    """J = sum_o pi(o) r(o), differentiable: the objective itself. rewards (M,) -> ()."""
    return (probabilities(policy, world) * rewards).sum()


def exact_kl(policy: nn.Module, other: nn.Module, world: World) -> Tensor:
    """KL(policy || other) = sum_o policy(o) log(policy(o) / other(o)), differentiable in both."""
    log_p = sequence_log_probs(world.log_probs(policy), world.mask)
    log_q = sequence_log_probs(world.log_probs(other), world.mask)
    return (log_p.exp() * (log_p - log_q)).sum()


def expected_loss(losses: Tensor, policy: nn.Module, world: World) -> Tensor:
    """The loss averaged over samples of the policy, as training averages it: sampling is frozen.

    Its gradient is that of the losses alone, not of the probabilities they are weighted with.
    losses (M,), one per completion -> ().
    """
    return (probabilities(policy, world).detach() * losses).sum()


def gradient(value: Tensor, policy: nn.Module) -> Tensor:
    """d value / d parameters of the policy, in one flat vector (P,). The graph is kept."""
    parameters = list(policy.parameters())
    parts = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(parameters, parts)
        ]
    )


@dataclass(frozen=True)
class Moments:
    """What an estimator's gradient is on average, and how far single groups are from that.

    Attributes:
        mean: (P,) expected gradient of the loss of one group.
        variance: mean squared distance of one group's gradient from that (a sum over P).
        standard_error: (P,) of `mean`; all 0 if every group was listed.
    """

    mean: Tensor
    variance: float
    standard_error: Tensor


def moments(
    estimator: Estimator,
    policy: nn.Module,
    world: World,
    rewards: Tensor,
    group_size: int,
    *,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Moments:
    """Mean and variance of the gradient that one group of completions gives.

    Args:
        estimator: a loss per group, see `Estimator`; it may not mix groups.
        policy: the one that samples the group and is differentiated.
        world: every completion.
        rewards: (M,), one per completion.
        group_size: G.
        samples: None lists all M^G groups and is exact; a number draws that many groups, and the
            standard error says how far off the mean may be.
        generator: the source of randomness, with samples.

    Raises:
        ValueError: an empty group, more than 1,000,000 groups to list, or fewer than two samples.
    """
    if not is_whole_number(group_size) or group_size < 1:
        raise ValueError(f"group_size: expected a whole number of 1 or more, got {group_size!r}")
    log_probs = world.log_probs(policy)  # (M, T)
    p = sequence_log_probs(log_probs, world.mask).exp().detach()  # (M,)
    jacobian = _jacobian(log_probs, policy)  # (M, T, P)
    if samples is None:
        if len(p) ** group_size > MOST_GROUPS:
            raise ValueError(
                f"group_size: expected at most {MOST_GROUPS} groups to list, got {len(p)}^"
                f"{group_size}; set samples"
            )
        groups = torch.cartesian_prod(*[torch.arange(len(p))] * group_size).view(-1, group_size)
        weights = p[groups].prod(dim=1)  # (B,)
    else:
        if samples < 2:
            raise ValueError(f"samples: expected 2 or more, got {samples}")
        drawn = torch.multinomial(p, samples * group_size, replacement=True, generator=generator)
        groups = drawn.view(samples, group_size)
        weights = torch.full((samples,), 1 / samples, dtype=p.dtype)

    first = second = 0.0  # sums of weight * gradient and of weight * gradient^2
    for some, weight in zip(groups.split(CHUNK), weights.split(CHUNK)):
        leaf = log_probs.detach()[some].requires_grad_()  # (B, G, T)
        losses = estimator(leaf, world.mask[some], rewards[some])
        (slope,) = torch.autograd.grad(losses.sum(), leaf)
        slope = torch.where(world.mask[some], slope, 0.0)
        per_group = torch.einsum("bgt,bgtp->bp", slope, jacobian[some])  # chain rule
        first = first + weight @ per_group
        second = second + weight @ per_group.square()
    spread = (second - first.square()).clamp(min=0)  # (P,)
    error = torch.zeros_like(spread) if samples is None else (spread / (samples - 1)).sqrt()
    return Moments(first, spread.sum().item(), error)


def _jacobian(log_probs: Tensor, policy: nn.Module) -> Tensor:
    """(M, T) -> (M, T, P): the gradient of every single log-prob."""
    flat = log_probs.flatten()
    rows = torch.eye(len(flat), dtype=flat.dtype)
    parts = torch.autograd.grad(
        flat, list(policy.parameters()), rows, retain_graph=True, is_grads_batched=True
    )
    return torch.cat([part.flatten(1) for part in parts], dim=1).view(*log_probs.shape, -1)
