"""What reusing a batch costs: notebook 03's task with 1 to 8 updates on every batch of texts.

Everything else is equal: the starting weights, the learning rate, and how many texts are sampled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from torch import nn

from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.objective import VARIANTS
from minigrpo.rewards import TextTask

PROMPTS = ("ROMEO:", "JULIET:", "HENRY:", "My lord", "O, ", "To be, or")
NO_CLIP = (1.0, 1e9)  # a range that no ratio leaves

ARMS: dict[str, dict[str, Any]] = {
    "product": {"level": "sequence"},
    "geometric": {"level": "geometric", "clip": VARIANTS["gspo"]["clip"]},
    "token": {"level": "token"},
    "token, no clip": {"level": "token", "clip": NO_CLIP},
}
"""One ratio per text, its geometric mean with GSPO's own range, and one ratio per token."""

EPOCHS = (1, 2, 4, 8)  # updates on each batch
RATE, OTHER_RATES = 3e-4, (1e-4, 1e-3)  # learning rates; the others with short texts only
LENGTHS = (24, 128)  # characters per text
SEEDS = (0, 1, 2)
STEPS = 16  # batches of 4 prompts x 16 texts: 1,024 texts in all


class Run(NamedTuple):
    """What is varied."""

    arm: str
    length: int
    epochs: int
    lr: float
    seed: int


RUNS = [Run(a, t, k, RATE, s) for t, s, k, a in product(LENGTHS, SEEDS, EPOCHS, ARMS)] + [
    Run(a, LENGTHS[0], k, lr, s) for lr, s, k, a in product(OTHER_RATES, SEEDS, EPOCHS, ARMS)
]


def config(one: Run) -> GRPOConfig:
    """The settings of one run: those of notebook 03, but for what is varied."""
    return GRPOConfig(
        steps=STEPS,
        prompts_per_step=4,
        group_size=16,
        max_new_tokens=one.length,
        inner_epochs=one.epochs,
        lr=one.lr,
        seed=one.seed,
        **ARMS[one.arm],
    )


def run(base: nn.Module, one: Run) -> Iterator[StepMetrics]:
    """Train a copy of `base` to write the letter e; yields what each step saw."""
    yield from train_grpo(copy.deepcopy(base), TextTask(PROMPTS), config(one))
