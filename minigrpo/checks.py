"""Checks that several functions of the core share, and those of a run: values where they enter."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral

import torch
from torch import Tensor, nn


def is_whole_number(value: object) -> bool:
    """Whether this counts something: an int of Python or numpy; 2.0 and True do not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_counts(least: int = 1, **counts: object) -> None:
    """Raise ValueError for anything but a whole number of at least `least`."""
    for name, value in counts.items():
        if not is_whole_number(value) or value < least:
            raise ValueError(f"{name}: expected a whole number of {least} or more, got {value!r}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError, with what there is to choose from, for a setting that does not exist."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_shape(name: str, values: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError for another shape, which might broadcast."""
    if tuple(values.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(values.shape)}")


def check_number(name: str, values: Sequence, number: int) -> None:
    """Raise ValueError unless there are so many."""
    if len(values) != number:
        raise ValueError(f"{name}: expected {number}, got {len(values)}")


def check_mask(name: str, mask: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError for a mask (N, S) of another shape, or a row without a real token."""
    check_shape(name, mask, shape)
    if not mask.bool().any(dim=-1).all():
        raise ValueError(f"{name}: expected a real token in every row, got a row without one")


def check_one_piece(name: str, mask: Tensor) -> None:
    """Raise ValueError if a row (N, S) has a hole, past which positions would be counted."""
    real = mask.bool()
    starts = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(dim=1)  # (N,)
    if (starts > 1).any():
        what = "a hole (a tool's tokens are read, too; only the loss leaves them out, by `own`)"
        raise ValueError(f"{name}: expected real tokens in one piece, got {what}")


def check_prompts(name: str, mask: Tensor, prompt_ids: Tensor) -> None:
    """Raise ValueError unless each row (N, P) ends with a real token: padding is on the left."""
    check_shape(name, mask, prompt_ids.shape)
    if not mask.bool()[:, -1].all():
        raise ValueError(f"{name}: expected padding on the left, got some at the end of a row")
    check_one_piece(name, mask)


def check_log_probs(name: str, values: Tensor, shape: Sequence[int]) -> None:
    """Raise TypeError for whole numbers, ValueError for another shape."""
    if not values.is_floating_point():
        raise TypeError(f"{name}: expected floating point, got {values.dtype} (token ids?)")
    check_shape(name, values, shape)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError unless the three settings describe a distribution."""
    if not 0 < temperature < float("inf"):
        what = f"a finite number above 0, got {temperature} (greedy: top_k=1)"
        raise ValueError(f"temperature: expected {what}")
    if top_k is not None:
        check_counts(top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], or None, got {top_p}")


def check_room(model: nn.Module, prompt_mask: Tensor, more: int) -> None:
    """Raise ValueError if the model's context cannot hold the prompts and `more` tokens."""
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    longest = int(prompt_mask.sum(dim=1).max())
    if context is not None and longest + more > context:
        what = f"room for {more} new tokens in the context of {context}"
        raise ValueError(f"prompt_ids: expected {what}, got prompts of {longest}")


def check_weights(policy: nn.Module) -> None:
    """Raise ValueError for weights of half precision, which swallow small steps (notebook 09)."""
    half = (torch.float16, torch.bfloat16)
    if any(p.dtype in half for p in policy.parameters() if p.requires_grad):
        what = "weights in float32: in half precision, small steps of the optimizer round to none"
        raise ValueError(f"policy: expected {what} (load it with dtype=torch.float32)")


def check_ends(step: int, ended: Tensor, config) -> None:
    """Raise RuntimeError if no completion (N,) of the first step ends: it cannot learn to stop."""
    if config.check and step == 1 and config.eos_id is not None and not ended.any():
        what = f"the {len(ended)} completions of the first step ended with eos_id = {config.eos_id}"
        raise RuntimeError(f"policy: none of {what} (is it the token that the policy was taught?)")


def check_first_ratio(log_probs: Tensor, old_log_probs: Tensor, own: Tensor) -> None:
    """Raise RuntimeError if the ratio is not 1, though the policy is still the one that sampled."""
    off = (log_probs.detach() - old_log_probs)[own].abs().max().item()
    if not off <= 1e-3:  # sums with and without a cache differ by less
        what = f"the ratio at a first update is off 1 by {math.expm1(off):.3g}: sampling and"
        raise RuntimeError(f"policy: {what} scoring disagree (dropout, positions, the cache?)")


def check_finite(metrics: Mapping[str, float]) -> None:
    """Raise FloatingPointError before an update that would make every weight NaN."""
    low, high = metrics["ratio/min"], metrics["ratio/max"]
    for name, value in (("loss", metrics["loss"]), ("gradient's norm", metrics["grad_norm"])):
        if not math.isfinite(value):
            what = f"expected a finite number (the ratio is between {low:.3g} and {high:.3g})"
            raise FloatingPointError(f"the {name} is {value}: {what}")
