"""The objective. So far its first factor: the ratio of two policies for the same text."""

from __future__ import annotations

import torch
from torch import Tensor

from minigrpo.logprobs import check_floating_point, check_mask, sequence_log_probs

LEVELS = ("token", "sequence", "geometric")


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
    if level not in LEVELS:
        raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
    check_floating_point("log_probs", log_probs)
    check_floating_point("old_log_probs", old_log_probs)
    if old_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"old_log_probs: expected shape {tuple(log_probs.shape)}, "
            f"got {tuple(old_log_probs.shape)}"
        )
    check_mask("mask", mask, log_probs.shape)
    # Garbage is replaced before it is subtracted: inf - inf under the mask would be NaN, and NaN
    # survives multiplication by zero, in the gradient too.
    log_ratio = torch.where(mask.bool(), log_probs, 0.0) - torch.where(
        mask.bool(), old_log_probs, 0.0
    )
    if level == "token":
        return log_ratio.exp()
    total = sequence_log_probs(log_ratio, mask)
    if level == "geometric":
        total = total / mask.sum(dim=-1)
    return total.exp()[:, None]
