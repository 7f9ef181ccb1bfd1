"""Bugs that public implementations of GRPO have had, for the length of a block.

Most are mistakes of the catalogue. A bug that is more than lines is a function from the healthy
function to the sick one: `with switch("padding_scored", sample=scored_twice)(): ...`

WARNING: everything here is wrong on purpose. `clinic` says what each does, and how it shows.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minigrpo import grpo
from minigrpo.arithmetic import Arithmetic, to_text
from minigrpo.clinic.catalogue import planted
from minigrpo.clinic.mistakes import Function
from minigrpo.sampling import Rollouts

Bug = Callable[[Function], Function]
"""From the healthy function to the sick one."""
Switch = Callable[[], AbstractContextManager[None]]
"""Puts a bug in for the length of a block."""


def switch(*mistakes: str, **bugs: Bug) -> Switch:
    """These mistakes, and sick functions for names of the loop (or for the reward of the sums)."""

    @contextmanager
    def block() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(planted(*mistakes))
            for name, bug in bugs.items():
                where = Arithmetic if name == "reward" else grpo
                stack.enter_context(patch.object(where, name, bug(getattr(where, name))))
            yield

    return block


def score(model: nn.Module, rollouts: Rollouts, temperature: float = 1.0) -> Tensor:
    """The completions' log-probs as the loop computes them, bug and all. (N, T)"""
    with torch.no_grad():
        return grpo.score(model, rollouts, grpo.GRPOConfig(temperature=temperature))[0]


def scored_twice(healthy: Function) -> Function:
    """A trainer that does not keep the sampler's log-probs, but scores the batch once more."""

    def sample(model: nn.Module, *args: Any, **options: Any) -> Rollouts:
        rollouts = healthy(model, *args, **options)
        return replace(rollouts, log_probs=score(model, rollouts, options["temperature"]))

    return sample


def nudged(base: nn.Module, seed: int = 0, by: float = 0.03) -> nn.Module:
    """A copy whose weights have moved a little, so that there is something to pull back."""
    moved, noise = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in moved.parameters():
            p += by * p.std(correction=0) * torch.randn(p.shape, generator=noise)
    return moved


def another_reference(healthy: Function) -> Function:
    return lambda policy: healthy(nudged(policy, seed=1, by=0.3))


def one_batch_late(healthy: Function) -> Function:
    """old <- policy is done before the update, so the batch is scored by the one before."""
    earlier: list[nn.Module] = []

    def sample(model: nn.Module, *args: Any, **options: Any) -> Rollouts:
        rollouts = healthy(model, *args, **options)
        old = earlier.pop() if earlier else model
        log_probs = score(old, rollouts, options["temperature"])
        earlier.append(copy.deepcopy(model))
        return replace(rollouts, log_probs=log_probs)

    return sample


def sampled_with(**options: Any) -> Callable[[Function], Function]:
    """The sampler cuts or sharpens the distribution; the scorer does not know."""

    def bug(healthy: Function) -> Function:
        return lambda *args, **settings: healthy(*args, **{**settings, **options})

    return bug


def rounded(healthy: Function) -> Function:
    """The sampler's copy of the weights is rounded to bfloat16, as in many an inference engine."""

    def sample(model: nn.Module, *args: Any, **options: Any) -> Rollouts:
        return healthy(copy.deepcopy(model).bfloat16().float(), *args, **options)

    return sample


def per_micro_batch(healthy: Function) -> Function:
    """A loss that is the mean of those of 8 rows each, though the loop says what to divide by."""

    def sick(log_probs, old, advantages, mask, *, ref_log_probs=None, entropy=None, whole=None,
             **settings):  # fmt: skip
        def micro_batch(rows):
            tensors = [None if x is None else x[rows] for x in (old, ref_log_probs, entropy)]
            return healthy(
                log_probs[rows], tensors[0], advantages[rows], mask[rows],
                ref_log_probs=tensors[1], entropy=tensors[2], **settings,
            )  # fmt: skip

        losses, metrics = zip(*map(micro_batch, torch.arange(len(log_probs)).split(8)))
        share = mask.sum().item() / whole[1] if whole else 1.0  # of the batch, in tokens
        mean = {key: fmean(m[key] for m in metrics) for key in metrics[0]}
        extremes = ("ratio/min", "ratio/max")
        mean = {key: x if key in extremes else x * share for key, x in mean.items()}
        return torch.stack(losses).mean() * share, mean

    return sick


def reads_the_prompt(healthy: Function) -> Function:
    """Takes the first answer in the text, that of the worked example, for the right one."""

    def reward(self, prompts, completions):
        texts = [
            to_text(torch.cat([p, c.cpu()])) for p, c in zip(prompts, completions, strict=True)
        ]
        answers = [re.findall(r"<answer> (\d) </answer>", text) for text in texts]
        return [float(len(a) > 1 and a[-1] == a[0]) for a in answers]

    return reward
