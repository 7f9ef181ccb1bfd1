"""The cases that the judge of losses asks: small enough to be done by hand.

Each of them is where some of the named mistakes answer otherwise than the right code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

KINDS = {  # of functions, and what each is called with
    "loss": ("log_probs", "old_log_probs", "advantages", "completion_mask"),
    "advantages": ("rewards", "group_size"),
    "rewards": ("log_probs", "old_log_probs", "rewards", "group_size", "completion_mask"),
}
OPTIONAL = ("ref_log_probs", "entropy")  # inputs that a loss may have
BUILT_IN: dict[str, tuple] = {  # options; one that a function doesn't have is found out from these
    "how": ("sequence_mean", "token_mean", "constant"),
    "surrogate": ("clip", "cispo"),
    "level": ("token", "geometric", "sequence"),
    "clip": (
        *((0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (0.1, 0.1), (0.3, 0.3), (0.2, 4.0), (0.2, 5.0)),
        (1.0, float("inf")),  # none
    ),
    "scale": ("group", "none"),  # "batch" has to be said: unsaid it is a mistake
    "baseline": ("mean", "leave_one_out"),
    "eps": (1e-4, 1e-8, 1e-6, 1e-5, 0.0),
    "kl_weight": (0.0, 0.04, 0.1, 0.01, 0.02, 0.05, 0.001, 1.0),
    "estimator": ("k3", "k2"),  # "k1" as a loss is a mistake
    "kl_correction": (False, True),
    "entropy_weight": (0.0, 0.01, 0.1, 0.001, 0.05, 1.0),
}
DEFAULTS = {option: values[0] for option, values in BUILT_IN.items()}


class Probe(NamedTuple):
    what: str
    inputs: dict[str, Any]
    settings: dict[str, Any]

    @property
    def size(self) -> int:
        return next(iter(self.inputs.values())).numel()


def rows(ratios, advantages, mask=None, *, new=-1.0, kl=1.0, first=False, **settings) -> Probe:
    """Log-probs of `new`, everywhere `kl` times as likely as under the reference policy."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    real = torch.ones_like(ratio) if mask is None else torch.tensor(mask, dtype=torch.float64)
    words = f"ratios {ratios}, advantages {advantages}" + (f", mask {mask}" if mask else "")
    words += f", log-probs {new:g}" * (new != -1.0)
    words += f", {kl:g} times as likely as under the reference" * ("kl_weight" in settings)
    words += ", no old log-probs" * first
    inputs = {
        "log_probs": new * real,
        "old_log_probs": None if first else (new - ratio.log()) * real,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "completion_mask": real,
        "ref_log_probs": (new - torch.tensor(kl).double().log()) * real,
        "entropy": real.clone(),
    }
    return Probe(words, inputs, settings)


RAGGED = [[1, 0, 0, 0], [1, 1, 1, 1]]
UNEVEN = ([[1.1, 1, 1, 1], [0.9, 1.05, 1.1, 1]], [1, -2], RAGGED)
WIDE = ([[1.1, 1.1, 1, 1]], [1], [[1, 1, 0, 0]])
CISPO = {"surrogate": "cispo", "clip": (1.0, 1.0)}
LOSS = [
    *(rows([[r]], [1]) for r in (1.1, 0.5, 99)),
    *(rows([[r]], [-1]) for r in (1.5, 0.5, 9, 99)),
    rows([[1.1, 0.9]], [1]),
    rows([[1]], [1], first=True),
    *(rows([[r]], [a], clip=(0.2, 0.28)) for r, a in ((2, 1), (0.1, -1))),
    rows([[1, 1], [1, 1]], [1, -1]),
    rows(*UNEVEN),
    rows(*UNEVEN, how="token_mean"),
    rows(*UNEVEN, how="constant", max_length=5),
    rows([[1, 1], [1, 1]], [1, 1], [[1, 1], [0, 0]]),
    rows([[1, 1], [1, 1]], [1, 1], [[1, 1], [0, 0]], how="constant", max_length=5),
    rows(*WIDE, level="geometric"),
    rows(*WIDE, level="sequence"),
    rows([[1]], [1], new=-3.0, **CISPO),
    rows([[9]], [1], new=-3.0, **CISPO),
    rows([[0.1]], [1], new=-3.0, surrogate="cispo", clip=(0.5, 1.0)),
    *(rows([[1]], [0], kl=kl, kl_weight=1.0) for kl in (2.0, 1.0, 0.5)),
    rows([[1]], [0], new=-50.0, kl=2.0, kl_weight=1.0),
    *(rows([[1]], [0], kl=2.0, kl_weight=1.0, estimator=name) for name in ("k1", "k2")),
    rows([[3]], [0], kl=2.0, kl_weight=1.0, estimator="k1", kl_correction=True),
    rows(*UNEVEN, kl=2.0, kl_weight=0.1, how="token_mean"),
    rows([[1]], [1], entropy_weight=0.5),
]


def groups(rewards: list[float], size: int, **settings: Any) -> Probe:
    """Rewards alone."""
    inputs = {"rewards": torch.tensor(rewards, dtype=torch.float64), "group_size": size}
    return Probe(f"rewards {rewards} in groups of {size}", inputs, settings)


ADVANTAGES = [
    groups([1, 0], 2),
    groups([10, 0], 2),
    groups([1, 0], 2, eps=2.0),
    groups([10, 8, 1, 0], 2),
    groups([100, 0, 1, 0], 2),
    groups([2, 0, 1, 1], 2),
    groups([3, 1, 0, 5, 5, 2], 3),
    groups([10, 8, 1, 0], 2, scale="batch"),
    groups([2, 0, 1, 1], 2, scale="none"),
    groups([3, 1, 0, 5, 5, 2], 3, scale="none", baseline="leave_one_out"),
]


def both_signs(probe: Probe) -> Probe:
    """Every row twice, rewarded with plus and minus its advantage, in groups of two."""
    twice = {k: v if v is None else v.repeat_interleave(2, dim=0) for k, v in probe.inputs.items()}
    advantages: Tensor = twice.pop("advantages")
    sign = torch.tensor([1.0, -1.0]).double().repeat(len(advantages) // 2)
    words = f"{probe.what}, every row twice, the copy with the opposite reward"
    return Probe(words, {**twice, "rewards": advantages * sign, "group_size": 2}, probe.settings)


def one_token_each(probe: Probe) -> Probe:
    """The same rewards, each of a row of one token."""
    rewards = probe.inputs["rewards"].tolist()
    loss = rows([[1 + 0.01 * i] for i in range(len(rewards))], rewards)
    del loss.inputs["advantages"]
    return Probe(f"{probe.what}, one token each", {**loss.inputs, **probe.inputs}, probe.settings)


APART = [groups([size, 0], 2) for size in (1e-3, 1.0)]
SIZES = {"advantages": APART, "rewards": [*map(one_token_each, APART)]}
PROBES = {
    "loss": LOSS,
    "advantages": ADVANTAGES,
    "rewards": [*map(both_signs, LOSS), *map(one_token_each, ADVANTAGES)],
}
