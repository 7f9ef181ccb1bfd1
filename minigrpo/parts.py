"""A batch in parts that fit into memory: which rows are scored at once, and in which precision.

The parts' gradients add up to exactly that of the whole batch, since each part counts with its
share of what the loss divides by, of the rows or of the tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minigrpo.sampling import Rollouts


class Part(NamedTuple):
    """Rows of a batch that are scored at once, and how large a part of it they are."""

    rollouts: Rollouts
    advantages: Tensor  # (n,)
    rows: float  # n / N
    tokens: float  # their share of the tokens of all completions
    share: float  # of what the loss is divided by: `tokens` for a token mean, else `rows`


def parts_of(rollouts: Rollouts, advantages: Tensor, config) -> list[Part]:
    """The batch in parts of `rows_per_pass`, without the rows that have no gradient.

    Those have the advantage 0, and neither a KL nor an entropy bonus pulls at them. If that is all
    rows, the first one is kept: AdamW goes on by its averages, and other processes wait.
    """
    N, tokens = len(advantages), rollouts.completion_mask.sum().item()
    kept = torch.arange(N)
    if not config.kl_weight and not config.entropy_weight:
        kept = advantages.nonzero()[:, 0].cpu() if advantages.any() else kept[:1]
    parts = []
    for rows in kept.split(config.rows_per_pass):
        some = without_empty_columns(rollouts[rows.to(rollouts.completions.device)])
        of_rows, of_tokens = len(rows) / N, some.completion_mask.sum().item() / tokens
        share = of_tokens if config.how == "token_mean" else of_rows
        parts.append(Part(some, advantages[rows], of_rows, of_tokens, share))
    return parts


def without_empty_columns(r: Rollouts) -> Rollouts:
    """Where every row has ended, there is nothing to score."""
    T = int(r.completion_mask.sum(dim=1).max())
    written = (t[:, :T] for t in (r.completions, r.completion_mask, r.log_probs))
    return Rollouts(r.prompt_ids, r.prompt_mask, *written)


def together(found: Sequence[Mapping[str, float]], parts: Sequence[Part], config) -> dict:
    """The metrics of a batch from those of its parts."""
    rows, tokens, shares = ([getattr(p, k) for p in parts] for k in ("rows", "tokens", "share"))
    counted = tokens if config.level == "token" else rows  # how many ratios there are
    whole = {}
    for name in found[0]:
        values = [metrics[name] for metrics in found]
        sizes = shares if "loss" in name else counted if "ratio" in name else tokens
        whole[name] = sum(value * size for value, size in zip(values, sizes))
        if name in ("ratio/min", "ratio/max"):
            whole[name] = min(values) if name == "ratio/min" else max(values)
        elif name in ("ratio/mean", "kl", "entropy"):  # of what was scored
            whole[name] /= sum(sizes)
    return whole


def precision(policy: nn.Module, dtype: str) -> torch.autocast:
    """Matrix products in bfloat16, if asked for; weights and their updates stay in float32."""
    device = next(policy.parameters()).device.type
    return torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Gradient checkpointing, if the model was told so by `gradient_checkpointing_enable`.

    Layers do it in train mode alone, so they are told that they train, and the modules inside them
    aren't: dropout stays off. (A layer with dropout of its own, as in OPT, fails the first check.)
    """
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    was = [layer.training for layer in layers]
    for layer in layers:
        layer.training = torch.is_grad_enabled()
    try:
        yield
    finally:
        for layer, training in zip(layers, was):
            layer.training = training
