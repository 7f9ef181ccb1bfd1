"""Exact answers by enumeration, in a world small enough to list.

Five tokens, one of them EOS, and completions of up to four tokens make 341 possible texts. Every
expectation is then a finite sum, and so are bias and variance of what estimates it from a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from minigrpo.logprobs import sequence_log_probs, token_log_probs

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""log_probs (B, G, T), mask (B, G, T), rewards (B, G) -> losses (B,), one per group."""
CHUNK = 4096  # groups whose gradients are held at a time


class TablePolicy(nn.Module):
    """Logits (V, V) of the next token, row a after token a; answers the Hugging Face call."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.detach().clone())

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids], past_key_values=None)


@dataclass(frozen=True)
class World:
    """Every completion there is. The prompt is a single EOS, as at the start of a document."""

    completions: Tensor  # (M, T) token ids, EOS after the end
    mask: Tensor  # (M, T) bool, True up to and including the first EOS
    vocab_size: int  # V; the last token is EOS

    @property
    def eos_id(self) -> int:
        return self.vocab_size - 1

    def log_probs(self, policy: nn.Module) -> Tensor:
        """(M, T) log-probability of each token of each completion, with gradient."""
        prompt = torch.full((len(self.completions), 1), self.eos_id)
        real = torch.cat([torch.ones_like(prompt), self.mask], dim=1)
        return token_log_probs(policy, torch.cat([prompt, self.completions], dim=1), real)


def list_world(vocab_size: int = 5, max_length: int = 4) -> World:
    """Every completion of up to `max_length` tokens, with EOS at its end or cut off there."""
    eos = vocab_size - 1
    lengths = range(max_length + 1)
    texts = (words for n in lengths for words in itertools.product(range(eos), repeat=n))
    completions = torch.tensor([words + (eos,) * (max_length - len(words)) for words in texts])
    length = (completions != eos).sum(dim=1)  # without EOS
    return World(completions, torch.arange(max_length) <= length[:, None], vocab_size)


def probabilities(policy: nn.Module, world: World) -> Tensor:
    """(M,) probability of each completion, with gradient; they sum to 1."""
    return sequence_log_probs(world.log_probs(policy), world.mask).exp()


def expected_reward(policy: nn.Module, world: World, rewards: Tensor) -> Tensor:
    """J = sum_o pi(o) r(o), differentiable: the objective itself. rewards (M,) -> ()."""
    return (probabilities(policy, world) * rewards).sum()


def exact_kl(policy: nn.Module, other: nn.Module, world: World) -> Tensor:
    """KL(policy || other) = sum_o policy(o) log(policy(o) / other(o)), differentiable in both."""
    log_p, log_q = (sequence_log_probs(world.log_probs(p), world.mask) for p in (policy, other))
    return (log_p.exp() * (log_p - log_q)).sum()


def expected_loss(losses: Tensor, policy: nn.Module, world: World) -> Tensor:
    """The losses (M,) averaged over samples -> (), as in training: sampling has no gradient."""
    return (probabilities(policy, world).detach() * losses).sum()


def gradient(value: Tensor, policy: nn.Module) -> Tensor:
    """d value / d parameters of the policy, in one flat vector (P,). The graph is kept."""
    settings = {"retain_graph": True, "materialize_grads": True}  # zeros instead of None
    parts = torch.autograd.grad(value, list(policy.parameters()), **settings)
    return torch.cat([part.flatten() for part in parts])


@dataclass(frozen=True)
class Moments:
    """What an estimator's gradient is on average, and how far single groups are from that."""

    mean: Tensor  # (P,) expected gradient of the loss of one group
    variance: float  # mean squared distance of one group's gradient from it (a sum over P)


def moments(
    estimator: Estimator,  # may not mix groups
    policy: nn.Module,  # samples the groups, and is differentiated
    world: World,
    rewards: Tensor,  # (M,), one per completion
    group_size: int,  # G
) -> Moments:
    """Mean and variance of the gradient that a group of completions gives, over all M^G groups."""
    log_probs = world.log_probs(policy)  # (M, T)
    p = sequence_log_probs(log_probs, world.mask).exp().detach()  # (M,)
    jacobian = _jacobian(log_probs, policy)  # (M, T, P)
    groups = torch.cartesian_prod(*[torch.arange(len(p))] * group_size).view(-1, group_size)
    weights = p[groups].prod(dim=1)  # (B,)

    first = second = 0.0  # sums of weight * gradient and of weight * gradient^2
    for chunk, weight in zip(groups.split(CHUNK), weights.split(CHUNK)):
        leaf = log_probs.detach()[chunk].requires_grad_()  # (B, G, T)
        loss = estimator(leaf, world.mask[chunk], rewards[chunk]).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
        per_group = torch.einsum("bgt,bgtp->bp", slope, jacobian[chunk])  # chain rule
        first = first + weight @ per_group
        second = second + weight @ per_group.square()
    return Moments(first, (second - first.square()).clamp(min=0).sum().item())


def _jacobian(log_probs: Tensor, policy: nn.Module) -> Tensor:
    """(M, T) -> (M, T, P): the gradient of every single log-prob."""
    flat = log_probs.flatten()
    rows = torch.eye(len(flat), dtype=flat.dtype)
    settings = {"retain_graph": True, "is_grads_batched": True}
    parts = torch.autograd.grad(flat, list(policy.parameters()), rows, **settings)
    return torch.cat([part.flatten(1) for part in parts], dim=1).view(*log_probs.shape, -1)
