"""Bugs that public implementations of GRPO have had, each a small switch on the healthy code.

A bug is a function from the healthy function to the sick one: where it is one line instead of
another, `line("ref = old")`. It is put in its place for the length of a block, and only there:
`with loop(grpo_loss=line("ref = old"))(): ...`

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
from minigrpo.arithmetic import Arithmetic, read_question, running_totals, to_text
from minigrpo.clinic.mistakes import Function, mutant
from minigrpo.llama import tiny_llama
from minigrpo.logprobs import token_entropy
from minigrpo.sampling import Rollouts

Bug = Callable[[Function], Function]
"""From the healthy function to the sick one."""
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


def line(*lines: str) -> Bug:
    """The bug that consists of these lines, instead of those that begin alike."""

    def bug(healthy: Function) -> Function:
        sick = mutant(healthy, *lines)
        sick.__module__ = __name__  # whoever asks is told that it is none of the real ones
        return sick

    return bug


def score(model: nn.Module, rollouts: Rollouts, temperature: float = 1.0) -> Tensor:
    """The completions' log-probs as the loop computes them, bug and all. (N, T)"""
    with torch.no_grad():
        scored = grpo.completion_log_probs_and_entropy(
            model, *rollouts.text, temperature=temperature
        )
    return scored[0]


def scored_twice(healthy: Function) -> Function:
    """A trainer that does not keep the sampler's log-probs, but scores the batch once more."""

    def sample(model: nn.Module, *args: Any, **options: Any) -> Rollouts:
        rollouts = healthy(model, *args, **options)
        return replace(rollouts, log_probs=score(model, rollouts, options["temperature"]))

    return sample


def unshifted(healthy: Function) -> Function:
    def sick(model, prompt_ids, prompt_mask, completions, completion_mask, *, temperature=1.0, **_):
        ids = torch.cat([prompt_ids, completions], dim=1)
        mask = torch.cat([prompt_mask, completion_mask], dim=1)
        logits = model(ids, attention_mask=mask.long()).logits / temperature
        chosen = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)  # no shift
        width = completions.shape[1]
        log_probs = torch.where(completion_mask, chosen[:, -width:], 0.0)
        return log_probs, token_entropy(logits[:, -width:])

    return sick


interleaved = line(  # every P-th row for a group
    "rewards = rewards.view(group_size, -1).T.flatten(); equal = equal_groups(rewards, group_size)",
    "return advantages.view(-1, group_size).T.flatten().to(dtype)",
)
no_floor = line(
    "groups = rewards.float().view(-1, group_size); mean = groups.sum(1)[:, None] / group_size",
    "return ((groups - mean) / (groups.std(1, keepdim=True) + 1e-8)).flatten()",
)
zero_over_zero = line(
    "groups = rewards.view(-1, group_size)",
    "return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()",
)
graph_in_old = line("old = new")
kl_to_old = line("ref = old")
# Its gradient is that of k1. Its value is k3's, so that the KL of every patient has one ruler.
gradient_of_k1 = line('return {"k3": d + (torch.expm1(-d)).detach()}[estimator]')
detached_entropy = line('metrics["entropy"] = mean(entropy.detach())')
wrong_side = line("return torch.minimum(ratio, ratio.clamp(1 - low, 1 + high)) * advantages")
padding_scored = line("real = torch.ones_like(completion_mask).bool()")
padded_on_the_right = line(
    "rows = [pad(torch.as_tensor(s), (0, longest - len(s)), value=pad_id) for s in sequences]",
    "return torch.stack(rows), torch.ones(len(rows), longest, dtype=torch.bool)",
)


def another_reference(healthy: Function) -> Function:
    return lambda policy: healthy(tiny_llama(seed=1))


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


def eos_masked(healthy: Function) -> Function:
    def sick(policy, reference, optimizer, rollouts, advantages, config, **options):
        written = rollouts.completions != config.eos_id  # ids != pad, where pad is eos
        rollouts = replace(rollouts, own=rollouts.own & written)
        return healthy(policy, reference, optimizer, rollouts, advantages, config, **options)

    return sick


def padding_left(healthy: Function) -> Function:
    """The loop's part of an unmasked sum: what the scorer says of the padding stays."""

    def sick(policy: nn.Module, rollouts: Rollouts, config: grpo.GRPOConfig) -> Any:
        return healthy(policy, replace(rollouts, own=torch.ones_like(rollouts.own)), config)

    return sick


def by_its_own_count(bug: Bug) -> Bug:
    """A loss that divides by the tokens it sees, though the loop says how many the batch has.

    What it says counts with their share of the batch, as the right loss of some rows does.
    """

    def counted(healthy: Function) -> Function:
        def loss(log_probs, old, advantages, mask, *, whole=None, **settings):
            value, metrics = bug(healthy)(log_probs, old, advantages, mask, **settings)
            share = mask.sum().item() / whole[1] if whole else 1.0
            extremes = ("ratio/min", "ratio/max")
            metrics = {k: x if k in extremes else x * share for k, x in metrics.items()}
            return value * share, metrics

        return loss

    return counted


denominator_only = by_its_own_count(
    line(
        "mask = torch.ones_like(completion_mask).bool()",
        "return loss * mask.numel() / completion_mask.sum(), "
        "{name: value.item() for name, value in metrics.items()}",
    )
)


@by_its_own_count
def per_micro_batch(healthy: Function) -> Function:
    def sick(log_probs, old, advantages, mask, *, ref_log_probs=None, entropy=None, **settings):
        def micro_batch(rows):
            tensors = [None if x is None else x[rows] for x in (old, ref_log_probs, entropy)]
            return healthy(
                log_probs[rows], tensors[0], advantages[rows], mask[rows],
                ref_log_probs=tensors[1], entropy=tensors[2], **settings,
            )  # fmt: skip

        losses, metrics = zip(*map(micro_batch, torch.arange(len(log_probs)).split(8)))
        mean = {key: sum(m[key] for m in metrics) / len(metrics) for key in metrics[0]}
        return torch.stack(losses).mean(), mean

    return sick


def confidence(healthy: Function) -> Function:
    """Completions are graded by how probable they are under the policy that wrote them."""

    def sick(*args):
        rollouts, _ = healthy(*args)
        mean = rollouts.log_probs.sum(1) / rollouts.completion_mask.sum(1)
        return rollouts, mean.exp().double().cpu()

    return sick


class ReadsThePrompt(Arithmetic):
    """Takes the first answer in the text, that of the worked example, for the right one."""

    def reward(self, prompts, completions):
        rewards = []
        for prompt, completion in zip(prompts, completions, strict=True):
            answers = re.findall(
                r"<answer> (\d) </answer>", to_text(torch.cat([prompt, completion.cpu()]))
            )
            rewards.append(float(len(answers) > 1 and answers[-1] == answers[0]))
        return rewards


class ComparesText(Arithmetic):
    """Compares what was written, such as 7, with a number as Python prints it, 7.0."""

    def reward(self, prompts, completions):
        right = [f"{running_totals(read_question(prompt))[-1]:.1f}" for prompt in prompts]
        answers = [re.findall(r"<answer> (\S+) </answer>", to_text(c)) for c in completions]
        return [float(a[-1:] == [r]) for a, r in zip(answers, right, strict=True)]
