"""The objective of GRPO: from rewards to advantages, from log-probs to the loss.

    loss = aggregate( -clipped surrogate + kl_weight * KL ) - entropy_weight * mean entropy

Advantages, losses and gradients are those of TRL 1.16's GRPOTrainer wherever it has the same
setting (the tests compare them), with one exception, on purpose: a group of equal rewards has
advantages of exactly 0.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from minigrpo.logprobs import check_floating_point, check_mask, is_whole_number

LEVELS = ("token", "sequence", "geometric")
SCALES = ("group", "batch", "none")
BASELINES = ("mean", "leave_one_out")
ESTIMATORS = ("k1", "k2", "k3")
SURROGATES = ("clip", "cispo")
AVERAGES = ("sequence_mean", "token_mean", "constant")

VARIANTS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, arXiv 2402.03300, equation 3 (which adds a KL term: kl_weight=0.04).
    "grpo": dict(scale="group", level="token", clip=(0.2, 0.2), how="sequence_mean"),
    # Liu et al. 2025, arXiv 2503.20783: no std, no 1/length; needs max_length=.
    "dr_grpo": dict(scale="none", level="token", clip=(0.2, 0.2), how="constant"),
    # Yu et al. 2025, arXiv 2503.14476: clip-higher, every token the same weight.
    "dapo": dict(scale="group", level="token", clip=(0.2, 0.28), how="token_mean"),
    # Zheng et al. 2025, arXiv 2507.18071: one length-normalised ratio per sequence.
    "gspo": dict(scale="group", level="geometric", clip=(3e-4, 4e-4), how="sequence_mean"),
    # MiniMax 2025, arXiv 2506.13585; the cap of 5 is that of ScaleRL (arXiv 2510.13786).
    "cispo": dict(scale="group", surrogate="cispo", clip=(0.2, 4.0), how="token_mean"),
    # Ahmadian et al. 2024, arXiv 2402.14740: the others are the baseline, the sequence is the
    # action. On-policy this is REINFORCE; the clip matters only from the second update on.
    "rloo": dict(
        scale="none",
        baseline="leave_one_out",
        level="sequence",
        clip=(0.2, 0.2),
        how="sequence_mean",
    ),
}
"""Published algorithms as settings: keyword arguments of `group_advantages` and `grpo_loss`."""

ADVANTAGE_SETTINGS = ("scale", "baseline", "eps")
"""Those of them that are arguments of `group_advantages`."""


# --------------------------------------------------------------------------------------------
# advantages


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scale: str = "group",
    baseline: str = "mean",
    eps: float = 1e-4,
) -> Tensor:
    """How much better each completion is than the others that answered the same prompt.

    A_i = (r_i - mean of its group) / (std of its group + eps), std with G - 1 in the denominator
    (Shao et al. 2024, arXiv 2402.03300, section 4.1.2; the std and eps of TRL). Computed in
    float64: in float32 sixteen rewards of 5.7 differ from their own mean.

    Args:
        rewards: (N,), prompt-major: rows kG to kG + G - 1 answer prompt k.
        group_size: G, 2 or more; N is a multiple of it.
        scale: divide by the std of the "group", of the whole "batch", or by nothing ("none").
        baseline: subtract the group's "mean", or the mean of the other members
            ("leave_one_out"; Kool et al. 2019), which is the same times G / (G - 1), or nothing
            ("none", with scale="none" only): plain REINFORCE, whose advantage is the reward.
        eps: added to the std.

    Returns:
        (N,), of the dtype of the rewards (the default dtype for whole numbers); with a baseline
        exactly 0 for a group whose rewards are all equal.

    Raises:
        ValueError: a group of one, rewards that do not fill groups or are not finite, unknown
            settings.
    """
    _check_choice("scale", scale, SCALES)
    _check_choice("baseline", baseline, (*BASELINES, "none"))
    if baseline == "none" and scale != "none":
        raise ValueError(
            f"scale: expected 'none' with baseline='none', because a std is measured around a "
            f"mean, got {scale!r}"
        )
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: expected a finite number of 0 or more, got {eps}")
    groups = _groups(rewards, group_size)  # (P, G) float64
    dtype = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
    if baseline == "none":
        return rewards.to(dtype)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if baseline == "leave_one_out":
        advantages = advantages * (group_size / (group_size - 1))
    if scale == "group":
        advantages = advantages / (groups.std(dim=1, keepdim=True) + eps)
    elif scale == "batch":
        advantages = advantages / (groups.std() + eps)
    # Rounding leaves a trace of the mean even in float64, and dividing by eps magnifies it.
    advantages = torch.where(_equal(groups)[:, None], 0.0, advantages).flatten()
    return advantages.to(dtype)


def equal_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Which groups cannot teach anything, because all their rewards are equal.

    rewards (N,) -> (P,) bool. Its mean is the metric `frac_reward_zero_std`. Raises ValueError as
    `group_advantages` does.
    """
    return _equal(_groups(rewards, group_size))


def _equal(groups: Tensor) -> Tensor:
    return groups.amax(dim=1) == groups.amin(dim=1)


def _groups(rewards: Tensor, group_size: int) -> Tensor:
    """(N,) -> (P, G) in float64, checked."""
    if not is_whole_number(group_size) or group_size < 2:
        raise ValueError(
            "group_size: expected a whole number of 2 or more (a group of one has nobody to be "
            f"compared with), got {group_size!r}"
        )
    if rewards.dim() != 1 or len(rewards) == 0 or len(rewards) % group_size:
        raise ValueError(
            f"rewards: expected shape (N,) with N a multiple of group_size = {group_size}, "
            f"got {tuple(rewards.shape)}"
        )
    bad = ~rewards.isfinite()
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"rewards: expected finite numbers, got {rewards[row].item()} in row {row}"
        )
    return rewards.double().view(-1, group_size)


# --------------------------------------------------------------------------------------------
# the terms of the loss


def policy_ratio(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, level: str = "token"
) -> Tensor:
    """How much likelier a text is under the new policy than under the one that wrote it.

    rho = pi_theta / pi_old = exp(log_probs - old_log_probs): always new over old. Both policies
    score the same text. Differentiable in log_probs.

    Args:
        log_probs: (N, T) under the new policy.
        old_log_probs: (N, T) under the old one.
        mask: (N, T), 1 = real token; the other positions are never read and get ratio 1.
        level: "token" (PPO, Schulman et al. 2017, arXiv 1707.06347, section 3): one ratio per
            token; "sequence": the product over the sequence; "geometric" (GSPO, Zheng et al. 2025,
            arXiv 2507.18071, section 4.1): its 1/length power.

    Returns:
        (N, T) for "token", (N, 1) otherwise.

    Raises:
        TypeError: whole numbers where log-probs are expected.
        ValueError: unknown level, shapes that differ, a row without a real token.
    """
    _check_choice("level", level, LEVELS)
    check_floating_point("log_probs", log_probs)
    check_floating_point("old_log_probs", old_log_probs)
    _check_shape("old_log_probs", old_log_probs, log_probs.shape)
    check_mask("mask", mask, log_probs.shape)
    return _ratio(_unmask(log_probs, mask), _unmask(old_log_probs, mask), mask, level)


def _ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, level: str) -> Tensor:
    """The same for log-probs that are 0 where masked; a row without a token has ratio 1."""
    log_ratio = log_probs - old_log_probs
    if level == "token":
        return log_ratio.exp()
    total = log_ratio.sum(dim=-1, keepdim=True)
    if level == "geometric":
        total = total / _count(mask, dim=-1)[:, None]
    return total.exp()


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, *, estimator: str = "k3") -> Tensor:
    """Estimate KL(pi_theta || pi_ref) from the log-probs of sampled tokens, token by token.

    With d = log_probs - ref_log_probs, in nats (Schulman 2020, "Approximating KL divergence"):
    k1 = d is unbiased, and negative for half the tokens; k2 = d^2 / 2 is biased, with a small
    spread; k3 = exp(-d) + d - 1 is unbiased and never negative.

    The gradient is another matter. Averaged over samples of the policy, k1 pulls nowhere, k2
    along the gradient of KL(pi_theta || pi_ref), k3 along that of KL(pi_ref || pi_theta). Times
    the ratio of the same action (kl_correction in `grpo_loss`, at the token level), k1 and k3
    pull along the gradient of KL(pi_theta || pi_ref).

    Args:
        log_probs: (N, T), or any shape, under the policy.
        ref_log_probs: the same shape, under the reference policy.
        estimator: "k1", "k2" or "k3".

    Returns:
        The same shape; differentiable in log_probs.

    Raises:
        TypeError: whole numbers where log-probs are expected.
        ValueError: unknown estimator, shapes that differ.
    """
    _check_choice("estimator", estimator, ESTIMATORS)
    check_floating_point("log_probs", log_probs)
    check_floating_point("ref_log_probs", ref_log_probs)
    _check_shape("ref_log_probs", ref_log_probs, log_probs.shape)
    d = log_probs - ref_log_probs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d  # expm1: exp(-d) - 1 without cancellation


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: tuple[float, float]) -> Tensor:
    """min(ratio A, clamp(ratio, 1 - low, 1 + high) A), the pessimistic one of the two.

    PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; to be maximised. The minimum is taken
    for both signs of the advantage: at A < 0 it stops the ratio below 1 - low, never above.
    ratio and advantages of shapes that broadcast.
    """
    low, high = clip
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    *,
    how: str = "sequence_mean",
    max_length: int | None = None,
) -> Tensor:
    """Turn one number per token into one number.

    Args:
        per_token: (N, T).
        mask: (N, T), 1 = real token; the other positions are never read.
        how: "sequence_mean": the mean of each row, then the mean of the rows (GRPO, TRL's
            "grpo"); "token_mean": one mean over all tokens (DAPO, TRL's "dapo" and "bnpo");
            "constant": the sum over N * max_length (Dr. GRPO, TRL's "dr_grpo").
        max_length: tokens that a completion may have, for "constant" only. Not the width of this
            batch: the loss would then depend on its longest row.

    Returns:
        (); rows without a real token count as 0 and stay in N.

    Raises:
        ValueError: unknown how, shapes that differ, "constant" without max_length.
    """
    _check_choice("how", how, AVERAGES)
    _check_shape("mask", mask, per_token.shape)
    if per_token.dim() != 2 or len(per_token) == 0:
        raise ValueError(
            f"per_token: expected shape (N, T) with at least one row, got {tuple(per_token.shape)}"
        )
    kept = _unmask(per_token, mask)
    if how == "sequence_mean":
        return (kept.sum(dim=-1) / _count(mask, dim=-1)).mean()
    if how == "token_mean":
        return kept.sum() / _count(mask)
    if max_length is None or not is_whole_number(max_length) or max_length < 1:
        raise ValueError(
            "max_length: expected the number of tokens that a completion may have, 1 or more, "
            f"because how is 'constant', got {max_length!r}"
        )
    return kept.sum() / (len(per_token) * max_length)


# --------------------------------------------------------------------------------------------
# the loss


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    ref_log_probs: Tensor | None = None,
    level: str = "token",
    clip: tuple[float, float] = (0.2, 0.2),
    surrogate: str = "clip",
    how: str = "sequence_mean",
    max_length: int | None = None,
    kl_weight: float = 0.0,
    estimator: str = "k3",
    kl_correction: bool = False,
    entropy: Tensor | None = None,
    entropy_weight: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """The loss to minimise, and what a dashboard shows of it.

    Equation 3 of DeepSeekMath (Shao et al. 2024, arXiv 2402.03300) with the settings of its
    descendants (`VARIANTS`). What stands where the mask is 0 is never read: neither value nor
    gradient depend on it.

    Args:
        log_probs: (N, T) under the policy that learns; the only argument with a gradient, beside
            `entropy`.
        old_log_probs: (N, T) under the policy that sampled, frozen; None = this is the first
            update, the two are the same, and the ratio is exactly 1.
        advantages: (N,), one per row.
        completion_mask: (N, T), 1 up to and including EOS; a row may be masked completely.
        ref_log_probs: (N, T) under the reference policy; needed if kl_weight is not 0, and
            measured wherever it is given.
        level: of the ratio, see `policy_ratio`.
        clip: how far the ratio may go below and above 1 before the gradient stops.
        surrogate: "clip" (`clipped_surrogate`), or "cispo" (MiniMax 2025, arXiv 2506.13585,
            equation 4): the ratio, capped at 1 + clip[1], is a constant weight of log_probs, so
            that no token loses its gradient; clip[0] is not used.
        how, max_length: see `aggregate`.
        kl_weight: beta. 0 = no KL term.
        estimator: see `kl_estimate`.
        kl_correction: multiply the KL estimate by the ratio; for k1 and k3 and a ratio per token
            the gradient is then that of KL(policy || reference).
        entropy: (N, T) entropy of each next-token distribution (`token_entropy`), with gradient.
        entropy_weight: of the mean entropy per token, which is added to the objective. A token
            mean, whatever `how` says: micro-batches of different lengths do not average to it.

    Returns:
        loss () and metrics, plain numbers: policy_loss; clip_ratio/low_mean, clip_ratio/high_mean
        and clip_ratio/region_mean (share of ratios whose gradient the clip has stopped; for cispo
        only high_mean, the share that met the cap with a positive advantage); ratio/min, ratio/mean
        and ratio/max; kl (if ref_log_probs is given; with its correction) and entropy (if given).

    Raises:
        TypeError: whole numbers where log-probs are expected.
        ValueError: shapes that differ, unknown settings, NaN at a real position, a token that
            could not have been sampled, a weight whose tensor is missing.

    A ratio that overflows (in float32 a log-ratio above 88, which only a long product reaches)
    gives a loss or a gradient that is not finite.
    """
    _check_choice("level", level, LEVELS)
    _check_choice("surrogate", surrogate, SURROGATES)
    _check_clip(clip)
    _check_choice("how", how, AVERAGES)
    _check_choice("estimator", estimator, ESTIMATORS)
    for name, weight in (("kl_weight", kl_weight), ("entropy_weight", entropy_weight)):
        if not math.isfinite(weight):
            raise ValueError(f"{name}: expected a finite number, got {weight}")
    if log_probs.dim() != 2:
        raise ValueError(f"log_probs: expected shape (N, T), got {tuple(log_probs.shape)}")
    _check_shape("completion_mask", completion_mask, log_probs.shape)
    _check_shape("advantages", advantages, log_probs.shape[:1])
    mask = completion_mask.bool()
    new = _real(log_probs, mask, "log_probs", log_probs.shape)
    old = new.detach()
    if old_log_probs is not None:
        old = _real(old_log_probs, mask, "old_log_probs", log_probs.shape).detach()
    if old.isinf().any():
        row, column = old.isinf().nonzero()[0].tolist()
        raise ValueError(
            f"old_log_probs: expected finite numbers, got {old[row, column].item()} at row {row}, "
            f"column {column} (a token of probability 0 cannot have been sampled)"
        )
    if not advantages.isfinite().all():
        row = int((~advantages.isfinite()).nonzero()[0])
        value = advantages[row].item()
        raise ValueError(f"advantages: expected finite numbers, got {value} in row {row}")
    A = advantages.detach().to(new.dtype)[:, None]  # (N, 1): the same for every token of a row

    ratio = _ratio(new, old, mask, level)  # (N, T) or (N, 1)
    if surrogate == "clip":
        objective = clipped_surrogate(ratio, A, clip)
    else:
        objective = ratio.clamp(max=1 + clip[1]).detach() * A * new
    per_token = -objective.expand_as(new)  # (N, T)

    measured = {}
    if ref_log_probs is not None:
        ref = _real(ref_log_probs, mask, "ref_log_probs", log_probs.shape).detach()
        kl = kl_estimate(new, ref, estimator=estimator)
        if kl_correction:
            kl = kl * ratio
        measured["kl"] = _mean(kl, mask)
    elif kl_weight:
        raise ValueError(
            f"ref_log_probs: expected a tensor, because kl_weight is {kl_weight}, got None"
        )
    policy_loss = aggregate(per_token, mask, how=how, max_length=max_length)
    loss = policy_loss
    if kl_weight:
        loss = loss + kl_weight * aggregate(kl, mask, how=how, max_length=max_length)

    if entropy is not None:
        mean_entropy = _mean(_real(entropy, mask, "entropy", log_probs.shape), mask)
        loss = loss - entropy_weight * mean_entropy if entropy_weight else loss
        measured["entropy"] = mean_entropy
    elif entropy_weight:
        raise ValueError(
            f"entropy: expected a tensor, because entropy_weight is {entropy_weight}, got None"
        )

    measured |= _ratio_metrics(ratio.detach(), A, mask, level, clip, surrogate)
    metrics = {name: value.item() for name, value in measured.items()}
    return loss, {"policy_loss": policy_loss.item(), **metrics}


@torch.no_grad()
def _ratio_metrics(
    ratio: Tensor,
    A: Tensor,
    mask: Tensor,
    level: str,
    clip: tuple[float, float],
    surrogate: str,
) -> dict[str, Tensor]:
    """Over real tokens where there is a ratio for each, over all rows otherwise."""
    counted = mask if level == "token" else torch.ones_like(ratio, dtype=torch.bool)
    low, high = clip
    clipped_low = (ratio < 1 - low) & (A < 0) & (surrogate == "clip")
    clipped_high = (ratio > 1 + high) & (A > 0)
    there = ratio[counted] if counted.any() else ratio.new_ones(1)
    return {
        "clip_ratio/low_mean": _mean(clipped_low.double(), counted),
        "clip_ratio/high_mean": _mean(clipped_high.double(), counted),
        "clip_ratio/region_mean": _mean((clipped_low | clipped_high).double(), counted),
        "ratio/min": there.min(),
        "ratio/mean": there.mean(),
        "ratio/max": there.max(),
    }


# --------------------------------------------------------------------------------------------
# what they share


def _unmask(values: Tensor, mask: Tensor) -> Tensor:
    """0 where the mask is 0. Multiplication would let NaN and infinities through, and their
    gradient too."""
    return torch.where(mask.bool(), values, 0.0)


def _count(mask: Tensor, dim: int | None = None) -> Tensor:
    """How many tokens, at least 1: what is divided by it is 0 when there is none."""
    counted = mask.bool().sum() if dim is None else mask.bool().sum(dim=dim)
    return counted.clamp(min=1)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return _unmask(values, mask).sum() / _count(mask)


def _real(values: Tensor, mask: Tensor, name: str, shape: torch.Size) -> Tensor:
    """Checked, and 0 where the mask is 0."""
    check_floating_point(name, values)
    _check_shape(name, values, shape)
    values = _unmask(values, mask)
    bad = values.isnan()
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}: expected numbers, got nan at row {row}, column {column}")
    return values


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _check_shape(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(values.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(values.shape)}")


def _check_clip(clip: tuple[float, float]) -> None:
    pair = isinstance(clip, tuple | list) and len(clip) == 2
    if not pair or not all(isinstance(c, Real) and c >= 0 for c in clip):
        raise ValueError(
            f"clip: expected two numbers of 0 or more, how far below and above 1, got {clip!r}"
        )
