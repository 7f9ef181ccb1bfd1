"""What TRL's GRPOTrainer answered to 40 ragged batches: `data/trl_answers.safetensors`, read.

`tests/make_trl_answers.py` makes the file, in float64, with TRL installed; to read it needs none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from minigrpo.files import data_folder

FILE = data_folder() / "trl_answers.safetensors"
SCALES = ("group", "batch", "none")

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo", max_completion_length=8),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4,
                 epsilon_high=4e-4),
    "grpo_kl": dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False),
    "grpo_kl_corrected": dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=True),
    "sequence_kl_corrected": dict(loss_type="bnpo", importance_sampling_level="sequence", beta=0.1,
                                  use_bias_correction_kl=True),
    "grpo_entropy": dict(loss_type="grpo", entropy_coef=0.01),
    "dapo_kl_entropy": dict(loss_type="dapo", epsilon_high=0.28, beta=0.02,
                            use_bias_correction_kl=True, entropy_coef=0.05),
}  # fmt: skip
"""Settings in TRL's words: arguments of GRPOConfig."""


class Case(NamedTuple):
    """What a loss is computed from; 0 where the mask is 0."""

    log_probs: Tensor  # (N, T), as the other three
    old_log_probs: Tensor | None
    ref_log_probs: Tensor
    entropy: Tensor
    advantages: Tensor  # (N,)
    mask: Tensor  # (N, T) of 0 and 1


class Answers:
    """The file, read: `cases`, `reward_cases`, `versions`, and `tensors` by name."""

    def __init__(self) -> None:
        with safe_open(FILE, framework="pt") as file:
            self.versions = json.loads(file.metadata()["versions"])
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}
        self.shapes = self.tensors["shapes"].tolist()
        columns = [self.per_case(name) for name in Case._fields]
        cases, first_update = map(Case._make, zip(*columns)), self.tensors["first_update"].tolist()
        self.cases = [
            case._replace(old_log_probs=None) if first else case
            for case, first in zip(cases, first_update)
        ]
        groups = self.tensors["reward_shapes"].tolist()
        self.reward_sizes = [P * G for P, G in groups]
        rewards = self.tensors["rewards"].split(self.reward_sizes)
        self.reward_cases = [(r, G) for r, (_, G) in zip(rewards, groups)]

    def per_case(self, name: str) -> list[Tensor]:
        """Cut what the file holds in one row: (N, T) of every case; of the advantages (N,)."""
        values = self.tensors[name]
        if name == "advantages":
            return list(values.split([N for N, _ in self.shapes]))
        parts = values.split([N * T for N, T in self.shapes])
        return [part.view(N, T) for part, (N, T) in zip(parts, self.shapes)]

    def losses(self, variant: str) -> Iterator[tuple[Tensor, Tensor, Tensor | None, dict]]:
        """TRL's answers to every case, as `trl_peer.trl_loss` gives them."""
        losses, entropy = self.tensors[f"{variant}/loss"], f"{variant}/entropy_gradient"
        of_entropy = self.per_case(entropy) if entropy in self.tensors else [None] * len(losses)
        start = f"{variant}/metrics/"
        stored = {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}
        metrics = (dict(zip(stored, row)) for row in zip(*(v.tolist() for v in stored.values())))
        yield from zip(losses, self.per_case(f"{variant}/gradient"), of_entropy, metrics)

    def advantages(self, scale: str) -> list[Tensor]:
        """TRL's advantages of every set of rewards."""
        return list(self.tensors[f"advantages/{scale}"].split(self.reward_sizes))


# TRL's words and ours

LOSS_TYPES = {  # surrogate, how, and how much of TRL's upper clip isn't in ours
    "grpo": ("clip", "sequence_mean", 0),
    "bnpo": ("clip", "token_mean", 0),
    "dapo": ("clip", "token_mean", 0),  # over all processes, where bnpo's mean is of each: ours
    "cispo": ("cispo", "token_mean", 1),  # TRL's is the cap itself, ours its distance from 1
    "dr_grpo": ("clip", "constant", 0),
}
LEVELS = {"token": "token", "sequence": "geometric"}  # TRL has no plain product
WORDS = {
    "max_completion_length": "max_length",
    "beta": "kl_weight",
    "use_bias_correction_kl": "kl_correction",
    "entropy_coef": "entropy_weight",
}


def translated(
    *,
    loss_type: str,
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    **others: Any,  # by WORDS
) -> dict[str, Any]:
    """Arguments of GRPOConfig as arguments of `grpo_loss`."""
    surrogate, how, more = LOSS_TYPES[loss_type]
    high = epsilon if epsilon_high is None else epsilon_high
    usual = dict(max_length=None, kl_weight=0.0, kl_correction=False, entropy_weight=0.0)
    usual |= dict(level=LEVELS[importance_sampling_level], clip=(epsilon, high - more))
    usual |= dict(surrogate=surrogate, how=how)
    return usual | {WORDS[name]: value for name, value in others.items()}


def in_trls_words(
    *, level: str, clip: tuple[float, float], surrogate: str, how: str, **others: Any
) -> dict[str, Any]:
    """Arguments of `grpo_loss`, the others by WORDS, as arguments of GRPOConfig; the way back."""
    known = {ours[:2]: (name, ours[2]) for name, ours in LOSS_TYPES.items()}
    loss_type, more = known[surrogate, how]
    words = {ours: name for name, ours in (LEVELS | WORDS).items()}
    settings = dict(loss_type=loss_type, importance_sampling_level=words[level])
    settings |= dict(epsilon=clip[0], epsilon_high=clip[1] + more)
    return settings | {words[name]: value for name, value in others.items()}
