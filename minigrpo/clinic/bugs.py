"""Bugs that public implementations of GRPO have had, each a small switch on the healthy code.

A bug is a function from the healthy function (or class) to the sick one. It is put in its place for
the length of a block, and only there: `with loop(sample=sampled_with(top_p=0.8))(): ...`

WARNING: everything here is wrong on purpose. `clinic` says what each does, and how it shows.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minigrpo import grpo, objective
from minigrpo.arithmetic import Arithmetic, to_text
from minigrpo.grpo import GRPOConfig
from minigrpo.llama import tiny_llama
from minigrpo.logprobs import token_entropy
from minigrpo.sampling import Rollouts

Function = Callable[..., Any]
Bug = Callable[[Any], Any]
"""From the healthy function, or class, to the sick one."""
Switch = Callable[[], AbstractContextManager[None]]
"""Puts a bug in for the length of a block."""


@contextmanager
def exchanged(module: Any, bugs: Mapping[str, Bug]) -> Iterator[None]:
    """For the length of a block, exchange names of a module (or of a class) for sick ones."""
    with ExitStack() as stack:
        for name, bug in bugs.items():
            stack.enter_context(patch.object(module, name, bug(getattr(module, name))))
        yield


def loop(**bugs: Bug) -> Switch:
    """A switch for names that the training loop uses."""
    return lambda: exchanged(grpo, bugs)


def terms(**bugs: Bug) -> Switch:
    """A switch for the terms of the objective."""
    return lambda: exchanged(objective, bugs)


def score(model: nn.Module, rollouts: Rollouts, temperature: float = 1.0) -> Tensor:
    """The completions' log-probs as the loop computes them, bug and all. (N, T)"""
    r = rollouts
    with torch.no_grad():
        return grpo.completion_log_probs_and_entropy(
            model,
            r.prompt_ids,
            r.prompt_mask,
            r.completions,
            r.completion_mask,
            temperature=temperature,
        )[0]


def scored_twice(healthy: Function) -> Function:
    """A trainer that does not keep the sampler's log-probs, but scores the batch once more."""

    def sample(model: nn.Module, *args: Any, **options: Any) -> Rollouts:
        rollouts = healthy(model, *args, **options)
        return replace(rollouts, log_probs=score(model, rollouts, options["temperature"]))

    return sample


def unshifted(healthy: Function) -> Function:
    def sick(model, prompt_ids, prompt_mask, completions, completion_mask, *, temperature=1.0):
        ids = torch.cat([prompt_ids, completions], dim=1)
        mask = torch.cat([prompt_mask, completion_mask], dim=1)
        logits = model(ids, attention_mask=mask.long()).logits / temperature
        own = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)  # no shift
        width = completions.shape[1]
        log_probs = torch.where(completion_mask, own[:, -width:], 0.0)
        return log_probs, token_entropy(logits[:, -width:])

    return sick


def interleaved(healthy: Function) -> Function:
    def sick(rewards, group_size, **settings):
        mixed = rewards.view(group_size, -1).T.flatten()  # every P-th row for a group
        return healthy(mixed, group_size, **settings).view(-1, group_size).T.flatten()

    return sick


def no_floor(healthy: Function) -> Function:
    def sick(rewards, group_size, **settings):
        groups = rewards.float().view(-1, group_size)
        mean = groups.sum(1, keepdim=True) / group_size
        return ((groups - mean) / (groups.std(1, keepdim=True) + 1e-8)).flatten()

    return sick


def another_reference(healthy: type) -> type:
    class Sick(healthy):
        def __init__(self, policy: nn.Module, config: GRPOConfig) -> None:
            super().__init__(policy, config)
            self.reference = tiny_llama(seed=1).to(self.device).eval().requires_grad_(False)

    return Sick


def kl_to_old(healthy: Function) -> Function:
    def sick(log_probs, old_log_probs, *args, ref_log_probs=None, **settings):
        if old_log_probs is not None:
            ref_log_probs = old_log_probs
        return healthy(log_probs, old_log_probs, *args, ref_log_probs=ref_log_probs, **settings)

    return sick


def detached_entropy(healthy: Function) -> Function:
    def sick(*args, entropy=None, **settings):
        return healthy(*args, entropy=None if entropy is None else entropy.detach(), **settings)

    return sick


def graph_in_old(healthy: Function) -> Function:
    return lambda log_probs, old_log_probs, *rest: healthy(log_probs, log_probs, *rest)


def zero_over_zero(healthy: Function) -> Function:
    return lambda rewards, group_size, **settings: (
        ((groups := rewards.view(-1, group_size)) - groups.mean(1, keepdim=True))
        .div(groups.std(1, keepdim=True))
        .flatten()
    )


def unguarded(healthy: Function) -> Function:
    """The loss of a trainer that lets NaN through."""

    def sick(log_probs, old_log_probs, advantages, *args, **settings):
        loss, metrics = healthy(
            log_probs, old_log_probs, advantages.nan_to_num(), *args, **settings
        )
        return loss + 0 * advantages.sum(), metrics

    return sick


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
        return lambda *args, **given: healthy(*args, **{**given, **options})

    return bug


def eos_masked(healthy: Function) -> Function:
    def sick(state, rollouts, *args):
        ids, eos = rollouts.completions, state.config.eos_id
        mask = rollouts.completion_mask & (ids != eos)  # ids != pad, where pad is eos
        return healthy(state, replace(rollouts, completion_mask=mask), *args)

    return sick


def padding_counted(healthy: Function) -> Function:
    """The scorer's part of an unmasked sum: it scores the filling too."""

    def sick(model, prompt_ids, prompt_mask, completions, completion_mask, **settings):
        everything = torch.ones_like(completion_mask)
        return healthy(model, prompt_ids, prompt_mask, completions, everything, **settings)

    return sick


def denominator_only(healthy: Function) -> Function:
    def sick(log_probs, old_log_probs, advantages, mask, *args, **settings):
        loss, metrics = healthy(
            log_probs, old_log_probs, advantages, torch.ones_like(mask), *args, **settings
        )
        return loss * mask.numel() / mask.sum(), metrics

    return sick


def padded_on_the_right(healthy: Function) -> Function:
    def sick(sequences, pad_id=0):
        ids, mask = healthy(sequences, pad_id)
        for row, sequence in enumerate(sequences):
            ids[row] = ids[row].roll(len(sequence) - ids.shape[1])
        return ids, torch.ones_like(mask)

    return sick


def per_micro_batch(healthy: Function) -> Function:
    def sick(log_probs, old, advantages, mask, *, ref_log_probs=None, entropy=None, **settings):
        def part(rows):
            some = [None if x is None else x[rows] for x in (old, ref_log_probs, entropy)]
            return healthy(
                log_probs[rows], some[0], advantages[rows], mask[rows],
                ref_log_probs=some[1], entropy=some[2], **settings,
            )  # fmt: skip

        losses, metrics = zip(*map(part, torch.arange(len(log_probs)).split(8)))
        mean = {key: sum(m[key] for m in metrics) / len(metrics) for key in metrics[0]}
        return torch.stack(losses).mean(), mean

    return sick


def confidence(healthy: Function) -> Function:
    """Completions are graded by how probable they are under the policy that wrote them."""

    def sick(task, prompts, rollouts):
        lengths = rollouts.completion_mask.sum(1)
        return (rollouts.log_probs.sum(1) / lengths).exp().double().cpu()

    return sick


def wrong_side(healthy: Function) -> Function:
    def sick(ratio: Tensor, advantages: Tensor, clip: tuple[float, float]) -> Tensor:
        low, high = clip
        free, held = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
        return torch.where(advantages >= 0, torch.minimum(free, held), torch.maximum(free, held))

    return sick


class ReadsThePrompt(Arithmetic):
    """Takes the first answer in the text, that of the worked example, for the right one."""

    def reward(self, prompts, completions):
        rewards = []
        for prompt, completion in zip(prompts, completions, strict=True):
            found = re.findall(
                r"<answer> (\d) </answer>", to_text(torch.cat([prompt, completion.cpu()]))
            )
            rewards.append(float(len(found) > 1 and found[-1] == found[0]))
        return rewards
