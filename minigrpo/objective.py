"""The objective of GRPO: from rewards to advantages, from log-probs to the loss.

    loss = aggregate( -clipped surrogate + kl_weight * KL ) - entropy_weight * mean entropy

Values and gradients are TRL 1.16's where it has the setting, but equal rewards give exactly 0.
"""

from functools import partial

import torch
from torch import Tensor

from minigrpo.checks import check_choice, check_counts, check_log_probs, check_shape

# fmt: off
VARIANTS = {  # published algorithms, as settings of `group_advantages` and `grpo_loss`
    # Shao et al. 2024, arXiv 2402.03300, equation 3 (which adds a KL term: kl_weight=0.04)
    "grpo": dict(scale="group", level="token", clip=(0.2, 0.2), how="sequence_mean"),
    # Liu et al. 2025, arXiv 2503.20783: no std, no 1/length; needs max_length=
    "dr_grpo": dict(scale="none", level="token", clip=(0.2, 0.2), how="constant"),
    # Yu et al. 2025, arXiv 2503.14476: clip-higher, every token the same weight
    "dapo": dict(scale="group", level="token", clip=(0.2, 0.28), how="token_mean"),
    # Zheng et al. 2025, arXiv 2507.18071: one length-normalized ratio per sequence
    "gspo": dict(scale="group", level="geometric", clip=(3e-4, 4e-4), how="sequence_mean"),
    # MiniMax 2025, arXiv 2506.13585; the cap of 5 is that of ScaleRL (arXiv 2510.13786)
    "cispo": dict(scale="group", surrogate="cispo", clip=(0.2, 4.0), how="token_mean"),
    # Ahmadian et al. 2024, arXiv 2402.14740: the others are the baseline, the text is the action
    "rloo": dict(scale="none", baseline="leave_one_out", level="sequence", clip=(0.2, 0.2),
                 how="sequence_mean"),
}  # fmt: on
ADVANTAGE_SETTINGS = ("scale", "baseline")  # those of them that `group_advantages` takes


def group_advantages(
    rewards: Tensor,  # (N,), prompt-major: rows kG to kG + G - 1 answer prompt k
    group_size: int,  # G, 2 or more
    *,
    scale: str = "group",  # divide by the std of the group, of the batch, or by nothing ("none")
    baseline: str = "mean",  # of the group, of its other members ("leave_one_out"), or "none"
    eps: float = 1e-4,  # added to the std
) -> Tensor:
    """How much better each completion (N,) is than the others that answered the same prompt.

    A_i = (r_i - mean of its group) / (std of its group + eps), std with G - 1 in the denominator
    (Shao et al. 2024, arXiv 2402.03300, section 4.1.2; the std and eps of TRL). Exactly 0 where all
    rewards of a group are equal. baseline="none" is plain REINFORCE: the reward itself.
    """
    check_choice("scale", scale, ("group", "batch", "none"))
    check_choice("baseline", baseline, ("mean", "leave_one_out", "none"))
    if baseline == "none" and scale != "none":  # a std is measured around a mean
        raise ValueError(f"scale: expected 'none' with baseline='none', got {scale!r}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps: expected a finite number of 0 or more, got {eps}")
    equal = equal_groups(rewards, group_size)  # (P,)
    groups = rewards.double().view(-1, group_size)  # in float32, 16 x 5.7 differ from their mean
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if baseline == "leave_one_out":  # the same as subtracting the mean of the others
        advantages = advantages * (group_size / (group_size - 1))
    if scale == "group":
        advantages = advantages / (groups.std(dim=1, keepdim=True) + eps)
    elif scale == "batch":
        advantages = advantages / (groups.std() + eps)
    # Rounding leaves a trace of the mean even in float64, and dividing by eps magnifies it.
    advantages = torch.where(equal[:, None], 0.0, advantages).flatten()
    dtype = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
    return (rewards if baseline == "none" else advantages).to(dtype)


def equal_groups(rewards: Tensor, group_size: int) -> Tensor:
    """(N,) -> (P,) bool: groups whose rewards are all equal, which cannot teach anything."""
    check_counts(2, group_size=group_size)  # a group of one has nobody to be compared with
    if rewards.dim() != 1 or len(rewards) % group_size or not rewards.isfinite().all():
        raise ValueError(f"rewards: expected P * {group_size} finite, got {rewards.tolist()}")
    groups = rewards.view(-1, group_size)
    return groups.amax(dim=1) == groups.amin(dim=1)


def policy_ratio(
    log_probs: Tensor,  # (N, T) under the new policy
    old_log_probs: Tensor,  # (N, T) under the one that wrote the text
    mask: Tensor,  # (N, T), 1 = counts; values at the others are never used
    *,
    level: str = "token",
) -> Tensor:
    """pi_new / pi_old, always new over old: how much more likely a text has become.

    One ratio per "token" (N, T) (PPO, arXiv 1707.06347), 1 where masked; or (N, 1): their product
    over the "sequence", or its 1/length power, "geometric" (GSPO, arXiv 2507.18071, section 4.1).
    """
    check_choice("level", level, ("token", "sequence", "geometric"))
    check_log_probs("log_probs", log_probs, log_probs.shape)
    check_log_probs("old_log_probs", old_log_probs, log_probs.shape)
    check_shape("mask", mask, log_probs.shape)
    log_ratio = _unmasked(log_probs, mask) - _unmasked(old_log_probs, mask)
    if level == "token":
        return log_ratio.exp()
    total = log_ratio.sum(dim=-1, keepdim=True)
    return (total if level == "sequence" else total / _count(mask, dim=-1)[:, None]).exp()


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, *, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) from sampled tokens, token by token, any shape, nats.

    With d = log_probs - ref_log_probs (Schulman 2020, "Approximating KL divergence"): k1 = d is
    unbiased, and often negative; k2 = d^2 / 2 is biased, with little noise; k3 = exp(-d) + d - 1 is
    unbiased and never negative. As a loss, on average, k1 pulls nowhere, k2 (and k1 or k3 times the
    ratio) along the gradient of KL(policy || reference), k3 along that of KL(reference || policy).
    """
    check_choice("estimator", estimator, ("k1", "k2", "k3"))
    check_log_probs("log_probs", log_probs, log_probs.shape)
    check_log_probs("ref_log_probs", ref_log_probs, log_probs.shape)
    d = log_probs - ref_log_probs
    # expm1: exp(-d) - 1 without cancellation
    return {"k1": d, "k2": d.square() / 2, "k3": torch.expm1(-d) + d}[estimator]


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: tuple[float, float]) -> Tensor:
    """min(ratio A, clamp(ratio, 1 - low, 1 + high) A) for both signs of A (PPO, equation 7)."""
    low, high = clip
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def aggregate(
    per_token: Tensor,  # (N, T)
    mask: Tensor,  # (N, T), 1 = counts; values at the others are never used
    *,
    how: str = "sequence_mean",
    max_length: int | None = None,  # for "constant": tokens a completion may have, not the width T
    whole: tuple[int, int] | None = None,  # (rows, tokens) of a larger batch to divide by
) -> Tensor:
    """(N, T) -> (): one number from one per token; a row without a token is a 0 that counts.

    "sequence_mean": the mean of each row, then of the rows (GRPO); "token_mean": one mean over all
    tokens (DAPO); "constant": the sum over N * max_length (Dr. GRPO). Parts of a whole add up.
    """
    check_choice("how", how, ("sequence_mean", "token_mean", "constant"))
    check_shape("mask", mask, per_token.shape)
    values, (rows, tokens) = _unmasked(per_token, mask), whole or (len(mask), _count(mask))
    if whole:  # not one of its parts
        check_counts(len(mask), rows=rows)
        check_counts(int(_count(mask)), tokens=int(tokens))
    if how == "sequence_mean":
        return (values.sum(dim=-1) / _count(mask, dim=-1)).sum() / rows
    if how == "token_mean":
        return values.sum() / tokens
    check_counts(max_length=max_length)
    return values.sum() / (rows * max_length)


def grpo_loss(
    log_probs: Tensor,  # (N, T) under the policy that learns, with gradient
    old_log_probs: Tensor | None,  # (N, T) of the sampler; None = on-policy: the same, ratio 1
    advantages: Tensor,  # (N,)
    completion_mask: Tensor,  # (N, T), 1 where the policy wrote: `Rollouts.own`; may be all 0
    *,
    ref_log_probs: Tensor | None = None,  # (N, T) under the reference policy
    level: str = "token",  # of the ratio, see `policy_ratio`
    clip: tuple[float, float] = (0.2, 0.2),  # how far below and above 1 a ratio keeps its gradient
    surrogate: str = "clip",  # or "cispo": the capped ratio is a constant weight of log_probs
    how: str = "sequence_mean",  # see `aggregate`
    max_length: int | None = None,
    whole: tuple[int, int] | None = None,  # see `aggregate`, too
    kl_weight: float = 0.0,  # beta
    estimator: str = "k3",  # see `kl_estimate`
    kl_correction: bool = False,  # multiply the KL estimate by the ratio
    entropy: Tensor | None = None,  # (N, T), with gradient
    entropy_weight: float = 0.0,  # of the mean entropy per token, whatever `how` says
) -> tuple[Tensor, dict[str, float]]:
    """The loss () to minimize, and what a dashboard shows of it.

    Equation 3 of DeepSeekMath (arXiv 2402.03300) with the settings of its descendants (`VARIANTS`).
    What is masked is never used: neither value nor gradient depend on it. With "cispo" (arXiv
    2506.13585, equation 4) no token loses its gradient, and clip[0] is not used.
    """
    check_choice("surrogate", surrogate, ("clip", "cispo"))
    if not all(bound >= 0 for bound in clip):
        raise ValueError(f"clip: expected two numbers of 0 or more, got {clip}")
    if kl_weight and ref_log_probs is None:
        raise ValueError(f"ref_log_probs: expected a tensor, because kl_weight is {kl_weight}")
    if entropy_weight and entropy is None:
        raise ValueError(f"entropy: expected a tensor, because entropy_weight is {entropy_weight}")
    check_shape("completion_mask", completion_mask, log_probs.shape)
    mask = completion_mask.bool()
    new = _real("log_probs", log_probs, mask)
    old = (new if old_log_probs is None else _real("old_log_probs", old_log_probs, mask)).detach()
    check_shape("advantages", advantages, new.shape[:1])  # (N, T) would broadcast where N = T
    A = advantages.detach().to(new.dtype)[:, None]  # (N, 1): the same for every token of a row

    ratio = policy_ratio(new, old, mask, level=level)  # (N, T) or (N, 1)
    if surrogate == "clip":
        objective = clipped_surrogate(ratio, A, clip)
    else:
        objective = ratio.clamp(max=1 + clip[1]).detach() * A * new
    average = partial(aggregate, mask=mask, how=how, max_length=max_length, whole=whole)
    mean = partial(aggregate, mask=mask, how="token_mean", whole=whole)
    loss = policy_loss = average(-objective.expand_as(new))
    counted = mask if level == "token" else None
    metrics = _ratio_metrics(ratio, A, counted, clip, surrogate, whole)
    metrics["policy_loss"] = policy_loss
    if ref_log_probs is not None:
        ref = _real("ref_log_probs", ref_log_probs, mask).detach()
        kl = kl_estimate(new, ref, estimator=estimator)
        kl = kl * ratio if kl_correction else kl
        if kl_weight:
            loss = loss + kl_weight * average(kl)
        metrics["kl"] = mean(kl)
    if entropy is not None:
        metrics["entropy"] = mean(_real("entropy", entropy, mask))
        if entropy_weight:
            loss = loss - entropy_weight * metrics["entropy"]
    return loss, {name: value.item() for name, value in metrics.items()}


@torch.no_grad()
def _ratio_metrics(ratio, A, mask, clip, surrogate, whole) -> dict[str, Tensor]:
    """Extremes of the ratios, and the fractions whose gradient the clip has stopped."""
    if mask is None:  # one ratio per row, and every row counts
        mask, whole = torch.ones_like(ratio).bool(), whole and (whole[0], whole[0])
    mean = partial(aggregate, mask=mask, how="token_mean", whole=whole)
    low = ((ratio < 1 - clip[0]) & (A < 0) & (surrogate == "clip")).double()
    high = ((ratio > 1 + clip[1]) & (A > 0)).double()
    there = ratio[mask] if mask.any() else ratio.new_ones(1)
    metrics = {"ratio/min": there.min(), "ratio/max": there.max()}
    metrics["ratio/mean"] = mean(ratio) if mask.any() else there.mean()
    for name, clipped in (("low", low), ("high", high), ("region", low + high)):
        metrics[f"clip_ratio/{name}_mean"] = mean(clipped)
    return metrics


def _real(name: str, log_probs: Tensor, mask: Tensor) -> Tensor:
    """Checked, and 0 where the mask is 0."""
    check_log_probs(name, log_probs, mask.shape)
    values = _unmasked(log_probs, mask)
    bad = ~values.isfinite() if name == "old_log_probs" else values.isnan()
    if bad.any():  # clipped, a ratio of NaN or infinity could be a number again
        where = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}: expected numbers, got {values[bad][0]} at row, column {where}")
    return values


def _unmasked(values: Tensor, mask: Tensor) -> Tensor:
    """0 where the mask is 0. A product would let NaN and infinities through, and their gradient."""
    return torch.where(mask.bool(), values, 0.0)


def _count(mask: Tensor, dim: int | None = None) -> Tensor:
    """How many tokens, at least 1: what is divided by it is 0 when there is none."""
    return (mask.bool().sum() if dim is None else mask.bool().sum(dim=dim)).clamp(min=1)
